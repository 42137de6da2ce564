"""Chunks of a request: documents that it brings, or passages of a knowledge base, and when it gets any."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ragjax.core import Chunk, Document, Hit, Message, Notice, Rag, Request, RequestError
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import KnowledgeBase, Query, SearchStage
from ragjax.retrieval.registry import KnowledgeRegistry
from ragjax.retrieval.union import BasePart, search_parts

BROUGHT = Notice(
    "the messages bring passages, so none were retrieved (--retrieve auto); rag.top_k asks for some", "passages_brought"
)

PASSAGE_CHARS = 160
"""Characters of the shortest passage that a message brings: about 40 tokens of English."""

_BLANK = re.compile(r"\n\s*\n")

MOST_EARLIER = 16
"""Earlier questions of a conversation whose passages stay, at most: each is searched for again."""


@dataclass(frozen=True)
class Grounding:
    """Finds what requests stand on. Any thread may call it."""

    knowledge: KnowledgeRegistry[KnowledgeBase]
    chunker: Chunker
    context_length: int  # most tokens of a prompt and its answer
    top_k: int  # chunks retrieved for requests that say nothing else
    share: bool  # whether tenants share the KV of knowledge bases
    retrieve: str = "auto"  # as `EngineOptions` has it
    fits: float = -1.0  # as `Knowledge` has it
    check: Callable[[], None] = lambda: None  # called for each document that a request brings; may raise

    def checked(self, check: Callable[[], None]) -> Grounding:
        return replace(self, chunker=self.chunker.checked(check), check=check)

    def hits(self, request: Request) -> tuple[Hit, ...] | None:
        """The chunks of a request, in the order they are to stand in; None: it uses no knowledge."""
        rag = request.rag
        if rag is None or not request.messages:
            return None
        for name in rag.named:
            self.knowledge.seen(name, request.tenant)  # unknown is an error even where nothing is looked up
        if rag.documents is not None:
            return self._given(rag.documents, rag.knowledge, request.tenant)
        return None if self._searched(request) is None else self._found(request, rag, _query(request))

    def earlier(self, request: Request) -> dict[int, tuple[Hit, ...]]:
        """The chunks of a conversation's earlier questions, by the index of the message, if its question is searched.

        They are searched for again, each with what was asked before it, and so are those that the earlier prompts had
        as long as the knowledge is the same. Of a long conversation the first ones are left out: about half of the
        context is for them.
        """
        if (rag := self._searched(request)) is None:
            return {}
        *before, _ = (i for i, one in enumerate(request.messages) if one.role == "user" and one.content.strip())
        most = min(MOST_EARLIER, self.context_length // 2 // (self._top_k(rag) * self.chunker.max_tokens))
        left = before[dropped(len(before), most) :]
        return {i: self._found(request, rag, _query(request, i + 1)) for i in left}

    def unfit(self, request: Request, hits: Sequence[Hit] | None) -> tuple[str, ...]:
        if hits is None or request.rag is None or request.rag.documents is not None:
            return ()
        best = max((hit.score for hit in hits), default=None)
        if best is None or best >= self.fits:
            return ()
        told = f"no passage fits the question: the nearest has a similarity of {best:.2f}, below {self.fits}"
        return (Notice(told, "no_passage_fits"),)

    def _found(self, request: Request, rag: Rag, query: Query) -> tuple[Hit, ...]:
        names = [source.knowledge for source in rag.searched]
        bases = [self.knowledge.seen(name, request.tenant) for name in names]
        parts = [BasePart(base, source.within) for base, source in zip(bases, rag.searched, strict=True)]
        found = search_parts(parts, query, self._top_k(rag), rag.min_score)
        public = {base.name: self._public(name) for base, name in zip(bases, names, strict=True)}
        return tuple(replace(hit, public=public[part.base.name], knowledge=part.base.name) for part, hit in found)

    def stages(self, request: Request, stages: int) -> Iterator[SearchStage] | None:
        if (rag := self._searched(request)) is None:
            return None
        source, *others = rag.searched
        # a later stage may leave out what an earlier one has
        if others or source.within is not None or rag.min_score is not None:
            return None
        base = self.knowledge.seen(source.knowledge, request.tenant)
        if base.indexing is not None and base.indexing.running:  # the answer tells so, and searches once
            return None
        public = self._public(source.knowledge)
        found = base.stages(_query(request), self._top_k(rag), stages)
        return (
            replace(stage, hits=tuple(replace(hit, public=public, knowledge=base.name) for hit in stage.hits))
            for stage in found
        )

    def unread(self, request: Request) -> tuple[str, ...]:
        if (rag := self._searched(request)) is None:
            return ()
        told = [self.knowledge.seen(source.knowledge, request.tenant).indexing for source in rag.searched]
        return tuple(one.notice for one in told if one is not None and one.notice is not None)

    def leaves_alone(self, request: Request) -> bool:
        """True if a request would get passages if its messages brought none."""
        return self.retrieve == "auto" and bool(self._searched(request, "always")) and not self._searched(request)

    def _public(self, name: str | None) -> bool:
        return self.share and not self.knowledge.owned(name)

    def _searched(self, request: Request, retrieve: str = "") -> Rag | None:
        """The request's choice of knowledge, if there is any to search and a question. retrieve: instead of ours."""
        rag, how = request.rag, retrieve or self.retrieve
        if rag is None or rag.graph is not None or rag.documents is not None or not request.question.strip():
            return None
        if not (rag.named or self.knowledge.names) or self._top_k(rag) < 1:
            return None
        if rag.named or rag.top_k is not None or how == "always":
            return rag
        return rag if how == "auto" and not brings_passages(request.messages) else None

    def _top_k(self, rag: Rag) -> int:
        return self.top_k if rag.top_k is None else rag.top_k

    def _given(self, documents: Sequence[str | Document], knowledge: str | None, tenant: str) -> tuple[Hit, ...]:
        hits: list[Hit] = []
        public = self._public(knowledge)
        room = self.context_length
        for document in documents:
            self.check()
            if isinstance(document, Document):
                chunks = self._cut(document, room)
                hits += [Hit(chunk, 1.0) for chunk in chunks]
            else:
                base = self.knowledge.seen(knowledge, tenant)
                chunks = base.document(document)
                hits += [Hit(chunk, 1.0, public, base.name) for chunk in chunks]
            room -= sum(len(chunk.tokens) for chunk in chunks)
            if room < 0:
                raise self._too_long()
        return tuple(hits)

    def _cut(self, document: Document, room: int) -> tuple[Chunk, ...]:
        # cutting takes long, and drops only white space: what is twice too long is seen without
        if self.chunker.exceeds(document.text, 2 * room):
            raise self._too_long()
        chunks = self.chunker.chunks(document)
        if not chunks:
            raise RequestError(f"document {document.id!r} has no text", param="rag.documents")
        return chunks

    def _too_long(self) -> RequestError:
        return overlong(self.context_length, "documents have", "Give fewer or shorter documents", "rag.documents")


def _query(request: Request, end: int | None = None) -> Query:
    *before, text = (one.content for one in request.messages[:end] if one.role == "user" and one.content.strip())
    return Query(text, tuple(before), request.tenant)


def brings_passages(messages: Sequence[Message]) -> bool:
    """True if a message of the user or a tool has a long line or paragraph before its last one, which asks."""
    texts = [message.content.strip() for message in messages if message.role in ("user", "tool")]
    pieces = (piece for text in texts for parts in (text.splitlines(), _BLANK.split(text)) for piece in parts[:-1])
    return any(len(piece) >= PASSAGE_CHARS for piece in pieces)


def dropped(turns: int, most: int) -> int:
    """Count the earlier turns that lose their passages, the oldest first, so that at most `most` keep them.

    Half of those that may keep them go at once: then the prompts of the next turns begin with what this one has.
    """
    if turns <= most or most < 1:
        return turns if most < 1 else 0
    step = most - most // 2
    return -(-(turns - most) // step) * step


def overlong(context_length: int, what: str, advice: str, param: str) -> RequestError:
    return too_long(
        f"the {what} more than {context_length} tokens; the context holds no more, answer included. {advice}", param
    )


def too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")
