"""The prompts of a workload in tokens, as ragjax makes them: what rivals get."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.load.system import index_folder
from benchmarks.load.workload import Ask, Workload
from benchmarks.quality.similarity import packaged_encoder
from ragjax.core import Chunk, Hit, Message
from ragjax.engine.sources import knowledge_opener
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import chat_prompt, graph_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.path import RelationPath, subgraphs_of


class Prompts:
    """Tokens by request, made ahead of time: rivals get retrieval for nothing."""

    def __init__(self, workload: Workload, model: Path):
        """Retrieval uses the workload's knowledge base, made if it is not kept yet."""
        self._tokenizer = Tokenizer.load(model)
        self._chunker = Chunker(partial(self._tokenizer.encode, special=False, continued=True))
        self._documents = {document.id: document for document in workload.documents}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        base = self._open(workload, index_folder(model)) if any(ask.top_k for ask in workload.asks) else None
        self._tokens = {ask.id: self._prompt(ask, base) for ask in workload.asks}
        if base is not None:
            base.close()

    def __call__(self, ask: Ask) -> list[int]:
        """The tokens of a request's prompt."""
        return self._tokens[ask.id]

    def _open(self, workload: Workload, folder: Path) -> KnowledgeBase:
        base = knowledge_opener(self._tokenizer, "flat", folder, packaged_encoder)(workload.knowledge)
        base.add(workload.documents)
        return base

    def _prompt(self, ask: Ask, base: KnowledgeBase | None) -> list[int]:
        messages = (Message("user", ask.question),)
        if ask.paths is not None:
            subgraphs = subgraphs_of([RelationPath(steps) for steps in ask.paths])
            made = graph_prompt(self._tokenizer, messages, subgraphs, trees=False)
            return [int(token) for token in made.tokens]
        if ask.documents is not None:
            hits = tuple(Hit(chunk, 1.0) for name in ask.documents for chunk in self._cut(name))
        elif base is not None and ask.top_k:
            hits = base.search(ask.question, ask.top_k)
        else:
            hits = None
        return [int(token) for token in chat_prompt(self._tokenizer, messages, hits).tokens]

    def _cut(self, name: str) -> tuple[Chunk, ...]:
        if name not in self._chunks:
            self._chunks[name] = self._chunker.chunks(self._documents[name])
        return self._chunks[name]
