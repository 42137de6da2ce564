"""Rivals that make a prompt cheaper by making its passages shorter (Cache-Craft, Table 1), at a matched rate.

`map-reduce`: the model itself sums up each passage for the question, and answers over the summaries. `llmlingua-2`
(Pan et al. 2024, arXiv:2403.12968): a classifier drops tokens; it runs in an environment of its own and needs a model
from a hub.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.common import envs
from benchmarks.quality.evaluation import Rival
from ragjax.core import Chunk, ConfigError, Hit, Message
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt

MAP = "Sum up the passage in a few words, keeping what helps to answer: {question}"


class MapReduce:
    """Every chunk is summed up by the model, in a request each, to at most `rate` of its tokens."""

    name = "map-reduce"

    def __init__(self, engine: Engine):
        """engine: whose model sums up."""
        self._engine = engine

    def condense(self, question: str, chunks: Sequence[Chunk], rate: float) -> tuple[list[Chunk], float]:
        """Summaries side by side, as the engine batches them; and the milliseconds."""
        began = time.perf_counter()
        waiting = [
            self._engine.begin_prompt(
                chat_prompt(
                    self._engine.tokenizer, [Message("user", MAP.format(question=question))], [Hit(chunk, 1.0)]
                ),
                strategy="full",
                max_tokens=max(1, math.ceil(rate * len(chunk.tokens))),
            )
            for chunk in chunks
        ]
        texts = [answer.result().text for answer in waiting]
        milliseconds = (time.perf_counter() - began) * 1e3
        return _shortened(self._engine, chunks, texts), milliseconds


class LLMLingua2:
    """The `llmlingua` package in its own environment."""

    name = "llmlingua-2"

    def __init__(self, engine: Engine):
        """Start the compressor.

        Raises:
            ConfigError: if its packages or its model cannot be had.
        """
        self._engine = engine
        try:
            self._worker = envs.Worker([envs.python("llmlingua"), envs.WORKERS / "llmlingua_worker.py"])
            self._worker.ask({"op": "load"})
        except envs.RivalError as error:
            raise ConfigError(
                "llmlingua-2 cannot run here: its packages (benchmarks/envs/llmlingua.txt) come from the package index "
                f"and its model from Hugging Face. Leave it out of --rivals. {error}"
            ) from error

    def condense(self, question: str, chunks: Sequence[Chunk], rate: float) -> tuple[list[Chunk], float]:
        """Each chunk with its least telling tokens dropped; and the milliseconds."""
        began = time.perf_counter()
        texts = self._worker.ask({"op": "compress", "texts": [c.text for c in chunks], "rate": rate})["texts"]
        return _shortened(self._engine, chunks, texts), (time.perf_counter() - began) * 1e3


def _shortened(engine: Engine, chunks: Sequence[Chunk], texts: Sequence[str]) -> list[Chunk]:
    encode = partial(engine.tokenizer.encode, special=False, continued=True)
    made = [f"{' '.join(text.split())}\n\n" for text in texts]
    return [
        replace(chunk, id=f"{chunk.id}-short", text=text, tokens=np.asarray(encode(text), np.int32))
        for chunk, text in zip(chunks, made, strict=True)
    ]


RIVALS: Mapping[str, Callable[[Engine], Rival]] = {rival.name: rival for rival in (MapReduce, LLMLingua2)}  # by name
