"""The front of an engine: knowledge, and requests until their prompts are made. Nothing of it needs a device.

An engine has one. So has a process that composes requests for engines elsewhere (`ragjax/cluster/fleet.py`): it owns
the knowledge of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.pool import PagePool
from ragjax.core import Embedded, EngineOptions, StepLimits
from ragjax.engine.build import (
    ENCODER,
    FrontParts,
    budget_of,
    compression_of,
    contract_of,
    grounds,
    strategies_of,
)
from ragjax.engine.card import Card
from ragjax.engine.grounding import Grounding
from ragjax.engine.measurement import alpha_of
from ragjax.engine.prepare import Preparation
from ragjax.engine.sources import fill, fill_graph, sources
from ragjax.models.hub import resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.passage import Cutter
from ragjax.retrieval.library import Library
from ragjax.schedule.grammar import Grammars

BATCH = 32
"""Texts that are embedded between two looks at whether that is to end."""


class Front:
    """Knowledge bases, graphs, library and prompts of one model.

    limits: what one step of the engine can read. pool: its pages. eos_ids: tokens that end an answer.
    """

    def __init__(
        self, parts: FrontParts, options: EngineOptions, limits: StepLimits, pool: PagePool, eos_ids: frozenset[int]
    ):
        self.parts = parts
        self.options = options
        directory = None if options.index_dir is None else Path(options.index_dir)
        self.library = Library(parts.knowledge, directory, quota=int(options.file_quota_gb * 2**30))
        grounding = Grounding(
            parts.knowledge,
            parts.chunker,
            parts.context_length,
            options.top_k,
            options.storage.share_knowledge,
            options.retrieve,
            Cutter(options.separators),
        )
        self.preparation = Preparation(
            tokenizer=parts.tokenizer,
            grounding=grounding,
            graphs=parts.graphs,
            strategies=parts.strategies,
            contract=parts.contract,
            limits=limits,
            pool=pool,
            context_length=parts.context_length,
            vocabulary=parts.tokenizer.vocab_size if parts.vocabulary is None else parts.vocabulary,
            eos_ids=eos_ids,
            grammars=Grammars(parts.tokenizer, eos_ids),
            recognise=options.recognise,
            lookup=options.lookup,
            compression=parts.compression,
        )

    @classmethod
    def load(cls, options: EngineOptions, card: Card) -> Front:
        """The front of an engine elsewhere, and its knowledge, which is indexed now.

        Raises:
            ConfigError: saying what to change.
        """
        local = resolve(options.model)
        tokenizer = Tokenizer.load(local.path)
        chosen = strategies_of(local, alpha_of(card.identity))
        contract = contract_of(options, chosen, card.identity, card.dtype, budget_of(options))
        parts = FrontParts(
            **grounds(options, tokenizer),
            model_name=card.model_name,
            context_length=card.context_length,
            tokenizer=tokenizer,
            contract=contract,
            strategies=chosen,
            compression=compression_of(options, [chosen[name] for name in contract.strategies]),
        )
        front = cls.beside(parts, options, card)
        try:
            front.fill()
        except BaseException:
            front.close()
            raise
        return front

    @classmethod
    def beside(cls, parts: FrontParts, options: EngineOptions, card: Card) -> Front:
        """The front of an engine elsewhere, without knowledge yet."""
        pool = PagePool(card.pages + 1, card.page_size)
        return cls(parts, options, card.limits, pool, frozenset(parts.tokenizer.eos_ids))

    def fill(self) -> None:
        """Read the knowledge that the options name.

        Raises:
            ConfigError: if it cannot be read, or does not fit the quality budget.
        """
        knowledge, graphs, progress = self.parts.knowledge, self.parts.graphs, self.options.progress
        for name, source in sources(self.options.knowledge).items():
            fill(knowledge.make(name), name, source, progress)
        self.parts.contract.begin(all(knowledge.get(name).preprocessed for name in knowledge.names))
        self.library.open()
        for name, source in sources(self.options.graph).items():
            fill_graph(graphs.make(name), name, source, progress)

    @property
    def embedding_model(self) -> str:
        """Name of the sentence encoder."""
        return ENCODER

    def embed(self, texts: Sequence[str], check: Callable[[], None] = lambda: None) -> Embedded:
        """As `Engine.embed`."""
        assert self.parts.encoder is not None
        encoder, vectors = self.parts.encoder(), list[NDArray[np.float32]]()
        tokens = encoder.count(texts)  # all of them are checked before any is embedded
        for begin in range(0, max(len(texts), 1), BATCH):
            check()
            vectors.append(encoder.encode(texts[begin : begin + BATCH]))
        return Embedded(np.concatenate(vectors), tokens)

    def close(self) -> None:
        """Give back what it holds."""
        self.library.close()
        self.parts.knowledge.close()
        self.parts.graphs.close()
