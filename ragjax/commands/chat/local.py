"""Answers from an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from ragjax.commands.chat.session import Account, Question, Settings
from ragjax.core import Answer, Document, Rag, Request, Sampling
from ragjax.engine import Engine


class Local:
    """An engine, which is closed with it."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._runner = asyncio.Runner()
        self.name = engine.model_name
        self.strategies = engine.strategies
        self.knowledge = engine.knowledge_names

    def ask(self, question: Question, settings: Settings) -> Iterator[str | Account]:
        """As `Source.ask` says."""
        fields = settings.rag()
        documents: tuple[str | Document, ...] | None = fields.pop("documents", None) and settings.documents
        rag = replace(Rag(**fields), documents=documents)
        request = Request(tuple(question), sampling=Sampling(max_tokens=settings.max_tokens), rag=rag)
        events = self._engine.submit(request)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    event = self._runner.run(anext(events))
                    yield Account.of_answer(event) if isinstance(event, Answer) else event.text
        finally:
            self._runner.run(events.aclose())

    def close(self) -> None:
        """Close the engine."""
        self._runner.close()
        self._engine.close()
