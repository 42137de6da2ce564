"""From a request to its prompt, in the caller's thread: retrieval, the choice of a strategy, the chat template.

Nothing of it needs a device: a process in front of replicas does it for all of them (`ragjax/cluster/fleet.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np

from ragjax import core
from ragjax.core.recent import Recent
from ragjax.core.registry import meant
from ragjax.engine.grounding import BROUGHT, Grounding, overlong, too_long
from ragjax.engine.knowledge import Knowledge
from ragjax.models.tokenizer import TextKey, Tokenizer
from ragjax.prompting import chat, facts
from ragjax.quality.contract import AUTO, Contract
from ragjax.quality.report import PREFIX
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import SearchStage
from ragjax.retrieval.registry import KnowledgeRegistry
from ragjax.reuse import DEPENDENCY
from ragjax.reuse.base import Strategy
from ragjax.reuse.naive import PACKET

PATH_CHARS = 64
"""Characters of given relation paths for each token of the context, at most: all are encoded to see how many fit."""


REMEMBERED = 2**24
"""Bytes of messages and their tokens that are remembered. A conversation brings its documents with every turn; a busy
core encodes 18,500 tokens in 109 ms."""


@dataclass(frozen=True)
class ServedBy:
    strategy: Strategy
    ratio: float | None = None  # None: the strategy's own
    picked: bool = False  # the quality contract has evidence of such requests, and picked it
    notice: str | None = None  # for the answer


@dataclass(frozen=True)
class Composer:
    """Makes the prompts of requests. Any thread may call it. RequestError: one cannot be served as asked."""

    tokenizer: Tokenizer
    grounding: Grounding
    graphs: KnowledgeRegistry[KnowledgeGraph]
    strategies: Mapping[str, Strategy]
    contract: Contract
    limits: core.StepLimits  # what one step can read
    check: Callable[[], None] = lambda: None  # called at each step of a loop over what a request brings; may raise
    texts: Recent[TextKey, core.Tokens] = field(default_factory=lambda: Recent(REMEMBERED))  # of messages

    @staticmethod
    def of(
        options: core.EngineOptions,
        knowledge: Knowledge,
        tokenizer: Tokenizer,
        strategies: Mapping[str, Strategy],
        contract: Contract,
        limits: core.StepLimits,
        context_length: int,
    ) -> Composer:
        share = options.storage.share_knowledge
        grounding = Grounding(
            knowledge.bases, knowledge.chunker, context_length, options.top_k, share, options.retrieve, knowledge.fits,
        )  # fmt: skip
        return Composer(tokenizer, grounding, knowledge.graphs, strategies, contract, limits)

    @property
    def context_length(self) -> int:
        return self.grounding.context_length

    def checked(self, check: Callable[[], None]) -> Composer:
        tokenizer, grounding = self.tokenizer.checked(check), self.grounding.checked(check)
        return replace(self, tokenizer=tokenizer, grounding=grounding, check=check)

    def _speaking(self, request: core.Request) -> Tokenizer:
        return self.tokenizer.speaking(request.template).remembering(self.texts, request.tenant)

    def ground(self, request: core.Request) -> core.Grounded:
        """Retrieve what a request needs, and make its prompt."""
        self._check_texts(request)
        if request.prompt is not None:
            prompt = chat.text_prompt(self.tokenizer, request.prompt)
            return core.Grounded(prompt, kept=tuple((len(prompt), one.seconds) for one in request.breakpoints))
        if request.rag is not None and request.rag.graph is not None:
            return self._ground_graph(request, request.rag, request.rag.graph)
        began = time.perf_counter()
        unread = self.grounding.unread(request)
        hits = self.grounding.hits(request)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        notices = (BROUGHT,) if hits is None and self.grounding.leaves_alone(request) else ()
        made = self.compose(request, hits)
        return replace(made, notices=(*notices, *unread, *made.notices), retrieve_ms=retrieve_ms)

    def search(self, request: core.Request, stages: int) -> Iterator[SearchStage] | None:
        """The search for a request's chunks in stages; None if it needs none, or its strategy depends on it."""
        if request.grounded is not None:
            return None
        self._check_texts(request)
        strategy = self.strategies.get(self.strategy_of(request.rag))
        if strategy is None or not strategy.steady:
            return None
        return self.grounding.stages(request, stages)

    def compose(self, request: core.Request, hits: tuple[core.Hit, ...] | None) -> core.Grounded:
        """The prompt of a request with these chunks (None: it uses no knowledge), and where they are from."""
        build = partial(
            chat.chat_prompt,
            self._speaking(request),
            request.messages,
            public=self.grounding.share,
            tools=request.tools,
        )
        found: Sequence[core.Hit] = ()
        if hits is None:
            prompt = build(None)
        else:
            earlier = self.grounding.earlier(request)
            prompt, found = _conversation(build, hits, earlier, self.grounding.fits)
            while earlier and not self._fits(prompt, request):
                earlier = dict([*earlier.items()][(len(earlier) + 1) // 2 :])
                prompt, found = _conversation(build, hits, earlier, self.grounding.fits)
        given = request.rag is not None and request.rag.documents is not None
        places = (i for i, one in enumerate(prompt.segments) if one.kind is core.Kind.CHUNK)
        pairs = zip(places, found, strict=True)
        sources = tuple(cited(hit, place, given) for place, hit in pairs)
        kept = tuple((self._before(one, request, hits, prompt), one.seconds) for one in request.breakpoints)
        return core.Grounded(prompt, notices=self.grounding.unfit(request, hits), sources=sources, kept=kept)

    def _before(
        self, place: core.Breakpoint, request: core.Request, hits: tuple[core.Hit, ...] | None, prompt: core.Prompt
    ) -> int:
        """Counts the tokens of a prompt before a place: those that it has in common with a chat that ends there."""
        if place.message is None:
            return len(prompt)
        last = request.messages[place.message]
        cut = replace(last, content=last.content[: place.characters])
        behind = () if last.role in ("user", "tool") else (core.Message("user", "?"),)
        shorter = replace(request, messages=(*request.messages[: place.message], cut, *behind), breakpoints=())
        with suppress(core.RequestError):  # of a template that refuses such a chat
            tokens, other = prompt.tokens, self.compose(shorter, hits).prompt.tokens
            size = min(len(tokens), len(other))
            differ = np.flatnonzero(tokens[:size] != other[:size])
            return int(differ[0]) if len(differ) else size
        return len(prompt)

    def _fits(self, prompt: core.Prompt, request: core.Request) -> bool:
        answer = min(request.sampling.room, self.context_length // 4)
        pieces = sum(segment.kind is not core.Kind.NODE for segment in prompt.segments)
        length = len(prompt) + answer
        return length <= self.context_length and self.limits.holds(length, pieces)

    def _ground_graph(self, request: core.Request, rag: core.Rag, asked: core.Graph) -> core.Grounded:
        began = time.perf_counter()
        if not request.messages:
            raise core.RequestError("a graph needs messages", param="rag.graph")
        given = sum(len(step) for path in asked.relation_paths or () for step in path)
        if given > (most := PATH_CHARS * self.context_length):
            raise too_long(
                f"the relation paths have {given} characters; the context takes up to {most}. Give fewer paths",
                "rag.graph.relation_paths",
            )
        graph = None if asked.relation_paths is not None else self.graphs.get(asked.name)
        strategy = self.resolve(replace(rag, strategy=self.strategy_of(rag))).strategy
        build = partial(
            chat.graph_prompt, self._speaking(request), request.messages, trees=strategy.name in DEPENDENCY,
            public=self.grounding.share, share=self.grounding.share and asked.relation_paths is None,
            tools=request.tools,
        )  # fmt: skip
        room = self.context_length - min(request.sampling.room, self.context_length // 2)
        grounded = facts.ground(facts.gather(graph, asked, request.question, self.check), build, room)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        told = None if graph is None or graph.indexing is None else graph.indexing.notice
        notices = (*(() if told is None else (told,)), *grounded.notices)
        return core.Grounded(grounded.prompt, strategy.name, grounded.facts, notices, retrieve_ms=retrieve_ms)

    def strategy_of(self, rag: core.Rag | None) -> str:
        """Name of the strategy that serves a request, as it says or leaves open; of `auto`, what it picks."""
        default, asked = self.contract.setting.strategy, None if rag is None else rag.strategy
        if rag is not None and rag.graph is not None and asked in (None, AUTO) and not self.contract.faulted:
            return default if default in DEPENDENCY else DEPENDENCY[0]
        name = default if asked is None else asked
        return self.contract.pick.strategy if name == AUTO else name

    def choose(self, rag: core.Rag, made: core.Grounded) -> ServedBy:
        if made.strategy is not None:
            return self.resolve(replace(rag, strategy=made.strategy))
        contract = self.contract
        if (contract.setting.strategy if rag.strategy is None else rag.strategy) != AUTO:
            return self.resolve(rag)
        if rag.recompute_ratio is not None:
            raise self._no_ratio(AUTO)
        reason = None if contract.faulted else contract.uncovered(made.prompt)
        setting = contract.pick if reason is None else contract.without_evidence(made.prompt)
        chosen = self.resolve(replace(rag, strategy=setting.strategy))
        picked = reason is None or setting != PREFIX
        return replace(chosen, ratio=setting.ratio, picked=picked, notice=reason or None)

    def resolve(self, rag: core.Rag) -> ServedBy:
        default = self.contract.setting
        strategy = self.strategies.get(default.strategy if rag.strategy is None else rag.strategy)
        if strategy is None:
            if rag.strategy == PACKET:
                reason = "the model has no packets: start the server with an adapter of python -m train.packet"
                raise core.invalid("rag.strategy", reason)
            known = meant(rag.strategy or "", (AUTO, *self.strategies))
            raise core.RequestError(f"unknown strategy {rag.strategy!r}; {known}", param="rag.strategy")
        self.check_ratio(rag, strategy)
        if rag.recompute_ratio is None and strategy.name == default.strategy:
            return ServedBy(strategy, default.ratio)
        return ServedBy(strategy, rag.recompute_ratio)

    def check_ratio(self, rag: core.Rag, strategy: Strategy) -> None:
        if rag.recompute_ratio is not None and not strategy.selective:
            raise self._no_ratio(strategy.name)

    def _no_ratio(self, name: str) -> core.RequestError:
        selective = ", ".join(name for name, other in self.strategies.items() if other.selective) or "none"
        reason = f"the strategy {name} takes no recompute_ratio; these do: {selective}"
        return core.invalid("rag.recompute_ratio", reason)

    def _check_texts(self, request: core.Request) -> None:
        """Refuse what is clearly too long before all of it is encoded."""
        if isinstance(request.prompt, str) and self.grounding.chunker.exceeds(request.prompt, 2 * self.context_length):
            raise overlong(self.context_length, "prompt has", "Shorten it", "prompt")
        # a template may leave out the reasoning of earlier answers
        texts = (text for m in request.messages for text in (m.content, *(call.arguments for call in m.tool_calls)))
        listed = () if request.tools is None else request.tools.offered
        said = "\n".join((*texts, *(f"{tool.description}{tool.parameters}" for tool in listed)))
        if self.grounding.chunker.exceeds(said, 4 * self.context_length):
            raise overlong(self.context_length, "messages have", "Shorten them", "messages")


def _conversation(
    build: Callable[..., core.Prompt], hits: Sequence[core.Hit], earlier: Mapping[int, Sequence[core.Hit]], fits: float
) -> tuple[core.Prompt, tuple[core.Hit, ...]]:
    """The prompt of a question with its chunks and those of earlier ones, and all chunks in order.

    A chunk that several questions found stands where the first of them has it, and nowhere else. Where passages of
    earlier questions stand, only those that fit are added: a small model takes what is nearest to the question.
    """
    again = {(hit.knowledge, hit.chunk.id): hit for hit in hits}
    seen = set[tuple[str | None, str]]()
    kept: dict[int, tuple[core.Hit, ...]] = {}
    for i, found in earlier.items():
        fit = (hit for hit in found if not kept or hit.score >= fits)
        new = {key: hit for hit in fit if (key := (hit.knowledge, hit.chunk.id)) not in seen}
        kept[i] = tuple(again.get(key) or replace(hit, earlier=True) for key, hit in new.items())
        seen |= new.keys()
    rest = tuple(hits)
    if earlier:
        rest = tuple(hit for key, hit in again.items() if key not in seen and hit.score >= fits)
    return build(rest, earlier=kept), (*chain.from_iterable(kept.values()), *rest)


def cited(hit: core.Hit, segment: int, given: bool) -> core.Citation:
    """Where a passage is from, which stands in this segment. given: whether the request named or brought it."""
    chunk, score = hit.chunk, None if given else hit.score
    return core.Citation(
        segment, hit.knowledge, chunk.document_id, chunk.source_name, chunk.title, chunk.page, chunk.heading, score,
        chunk.text, hit.earlier,
    )  # fmt: skip
