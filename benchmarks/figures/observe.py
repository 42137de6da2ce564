"""Full attention, watched: the attention that every token gave to every segment, and the values it computed.

The papers measure a chunk's output, the last layer's hidden states. The engine hands out no hidden states; the values
of the last layer, which are its input after a norm and a linear map, stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.probe import Probe
from ragjax.core import Chunk, Document, Hit, Kind, Measure, Message, Plan, Prefill, Prompt
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.reuse.base import Allocation
from ragjax.reuse.full import Full
from ragjax.reuse.influence import Influence, record

Floats = NDArray[np.float32]
PAST_QUESTION = "What do these passages say?"


class Watched(Full):
    """Full attention that keeps what it measures.

    score_LTZ: attention that each token of the last prompt gave to each segment, float32 [layers, tokens, segments].
    """

    measures = frozenset({Measure.LOGITS, Measure.SEGMENT_SCORE})

    def __init__(self) -> None:
        self.score_LTZ: Floats = np.zeros((0, 0, 0), np.float32)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """As full attention."""
        conversation = super().prefill(prompt, allocation, ratio)
        results = yield next(conversation)
        self.score_LTZ = results[Measure.SEGMENT_SCORE]
        try:
            conversation.send(results)
        except StopIteration as end:
            plan: Plan = end.value
            return plan
        raise AssertionError("full attention is one pass")


@dataclass(frozen=True)
class Seen:
    """What full attention did on a prompt. value_LNKD: values of the chunks' tokens, in order, float32."""

    prompt: Prompt
    score_LTZ: Floats
    value_LNKD: Floats

    @property
    def chunks(self) -> list[int]:
        """Indexes of the prompt's chunks."""
        return [i for i, segment in enumerate(self.prompt.segments) if segment.kind is Kind.CHUNK]

    def values(self, chunk: int) -> Floats:
        """Values of a segment that is a chunk, [layers, tokens, KV heads, D]."""
        begin = sum(len(self.prompt.segments[i]) for i in self.chunks if i < chunk)
        return self.value_LNKD[:, begin : begin + len(self.prompt.segments[chunk])]

    def influence(self, chunk: int) -> Influence:
        """What Cache-Craft keeps with a chunk that was computed here."""
        return record(self.prompt, chunk, np.arange(len(self.prompt), dtype=np.int32), self.score_LTZ)

    def asked(self) -> NDArray[np.float64]:
        """inter(C, U): attention that the question's tokens gave to each chunk, float64 [layers, chunks]."""
        question_LTZ = self.score_LTZ[:, self.prompt.starts[-2] :]
        inter_LZ: NDArray[np.float64] = question_LTZ[..., self.chunks].sum(1, dtype=np.float64)
        return inter_LZ


class Observer:
    """Runs full attention over prompts of passages."""

    def __init__(self, engine: Engine, chunk_tokens: int = 192):
        """chunk_tokens: most tokens of a chunk; the rest of a passage is left out."""
        self.engine = engine
        self._chunker = Chunker(partial(engine.tokenizer.encode, special=False, continued=True), chunk_tokens)

    def chunk(self, passage: Document) -> Chunk:
        """The first chunk of a passage."""
        return self._chunker.chunks(passage)[0]

    def prompt(self, question: str, chunks: Sequence[Chunk]) -> Prompt:
        """The prompt as the engine makes it of a chat."""
        return chat_prompt(self.engine.tokenizer, [Message("user", question)], [Hit(chunk, 1.0) for chunk in chunks])

    def see(self, prompt: Prompt, *, values: bool = True) -> Seen:
        """Compute it, and look at it. values: read the chunks' values too; they are empty otherwise."""
        watched = Watched()
        if not values:
            self.engine.answer_prompt(prompt, strategy=watched, max_tokens=1)
            return Seen(prompt, watched.score_LTZ, np.zeros((0, 0, 0, 0), np.float32))
        runner = self.engine._runner  # KV is read by nobody else, and in the engine's thread
        probe = Probe(watched, runner.read, runner.config.inverse_frequencies)
        self.engine.answer_prompt(prompt, strategy=probe, max_tokens=1)
        assert probe.kv is not None
        return Seen(prompt, watched.score_LTZ, probe.kv[1])


def moved(values_LNKD: Floats, base_LNKD: Floats) -> list[float]:
    """How far values lie from others, by layer: norm of the difference over norm of `base`."""
    gap_L = np.square(values_LNKD - base_LNKD).sum((1, 2, 3), dtype=np.float64)
    return [float(x) for x in np.sqrt(gap_L / np.square(base_LNKD).sum((1, 2, 3), dtype=np.float64))]
