"""The steps that a reuse strategy yields: passes over spans of keys, moves of cached KV, and the plan carried out."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core.compression import Compression
from ragjax.core.prompt import Intervals

SECTION_LAYERS = 8
"""Most layers of a section of the model."""


@dataclass(frozen=True, slots=True)
class Run:
    """Where `length` consecutive tokens live in the page pool: from slot `start` of `pages[0]` on."""

    pages: tuple[int, ...]
    start: int
    length: int

    def slots(self, page_size: int) -> NDArray[np.int32]:
        flat = self.start + np.arange(self.length, dtype=np.int32)
        return np.asarray(self.pages, np.int32)[flat // page_size] * np.int32(page_size) + flat % page_size

    def slice(self, begin: int, end: int, page_size: int) -> Run:
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"[{begin}, {end}) is outside a run of {self.length} tokens")
        if begin == end:
            return Run((), 0, 0)
        first = self.start + begin
        last = self.start + end - 1
        return Run(self.pages[first // page_size : last // page_size + 1], first % page_size, end - begin)


@dataclass(frozen=True)
class Span:
    """Keys a pass may read (or writes): tokens of one run, at one RoPE offset.

    indices: each token's index in the prompt, int32 [run.length]; `NEVER` hides a token from the pass (a stale one).
    offset: the key of a token stored rotated at position p takes part at position `p + offset`.
    hidden: half-open interval of token indexes that must not see these keys.
    """

    indices: NDArray[np.int32]
    run: Run
    offset: int = 0
    hidden: tuple[int, int] = (0, 0)

    @staticmethod
    def consecutive(index: int, run: Run, offset: int = 0, hidden: tuple[int, int] = (0, 0)) -> Span:
        return Span(np.arange(index, index + run.length, dtype=np.int32), run, offset, hidden)


def sections(layers: int, most: int = SECTION_LAYERS) -> tuple[int, ...]:
    """Boundaries of the fewest equal parts of a model's layers that hold no more than `most` each, 0 and the end too.

    Strategies that measure, or pause, at some depth do it there, whatever the stages of the device are.
    """
    depth = max(n for n in range(1, most + 1) if layers % n == 0)
    return tuple(range(0, layers + 1, depth))


class Measure(StrEnum):
    """Measurements that a pass hands back to its strategy, as host arrays, over the layers of `Pass.measured`.

    Heads are averaged, but for QUERY.

    A pass may have LOGITS and at most one of the others; KEY_SCORE and VALUED_SCORE count as one.
    """

    LOGITS = "logits"
    """float32 [n, vocab] for the rows named in `Pass.logits`; [n, 0] if nobody reads them on the host."""
    KEY_SCORE = "key_score"
    """float32 [layers, context]: probability that each token received, summed over the asking rows."""
    VALUED_SCORE = "valued_score"
    """float32 [layers, context]: the same, weighted by the L2 norm of the value received."""
    SEGMENT_SCORE = "segment_score"
    """float32 [layers, rows, segments]: probability that each row gave to each segment, its own token left out."""
    DEVIATION = "deviation"
    """float32 [layers, rows]: squared distance of each row's key from the stale one at its index."""
    QUERY = "query"
    """float32 [layers, rows, heads, D]: the query of each row, rotated."""


@dataclass(frozen=True)
class Pass:
    """One sweep: compute `rows` over the keys of `spans`.

    rows: token indexes to compute, int32 [n], ascending; each lies in a span of offset 0 in pages of the request's own,
        and its K/V is written there. Cached pages are never written.
    positions: RoPE position of each row, int32 [n].
    spans: every key the pass may read, disjoint in token indexes; those of `rows` included.
    measures: what to hand back.
    logits: indexes among `rows` whose next-token logits are returned; only if the pass ends with the last layer.
    layers: half-open range of layers to run (None: all). Beyond layer 0 it continues the pass before, which ended
        there: `rows` are among its rows. It begins at a boundary of `Allocation.stages` and may end anywhere.
    measured: half-open range of layers in which measures other than LOGITS are taken (None: all that run). Measuring
        fewer stages (`Allocation.stages`) is faster.
    asking: indexes among `rows` whose attention counts in scores by key (None: all).
    stale: cached keys that DEVIATION compares with, by index; a row without one has deviation 0.
    """

    rows: NDArray[np.int32]
    positions: NDArray[np.int32]
    spans: tuple[Span, ...]
    measures: frozenset[Measure] = frozenset()
    logits: tuple[int, ...] = ()
    layers: tuple[int, int] | None = None
    measured: tuple[int, int] | None = None
    asking: NDArray[np.int32] | None = None
    stale: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Move:
    """Copy cached KV into slots of the request's own, keys rotated to their new place, in some layers.

    indices: which tokens, int32 [n]. source: spans that hold them at any offset. target: spans of offset 0 in pages of
    the request's own. layers: half-open, at boundaries of `Allocation.stages`.
    """

    indices: NDArray[np.int32]
    source: tuple[Span, ...]
    target: tuple[Span, ...]
    layers: tuple[int, int]


@dataclass(frozen=True)
class Compaction:
    """Copy the KV of the tokens that a compression keeps, in each layer, into slots of the request's own.

    tokens: how many to choose from. source: spans that hold them, indexed from 0. target: as many slots as are kept, in
    the order of their indexes; they may be some of the source's. query_LWHD: rotated queries of the prompt's last rows,
    float32 (None: the scorer asks for none). mass_LN: attention that each token received, summed over rows, float32
    (likewise).
    """

    compression: Compression
    tokens: int
    source: tuple[Span, ...]
    target: Run
    query_LWHD: NDArray[np.float32] | None = None
    mass_LN: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Known:
    """The logits of the prompt's last token, float32 [vocab], before all that the prefill does is done.

    The first token is chosen by them at once; a prefill that yields this gets nothing back, and goes on.
    """

    logits: NDArray[np.float32]


Results = Mapping[Measure, NDArray[np.float32]]
"""What a pass measured, by name; whatever else is yielded gives nothing."""


@dataclass(frozen=True)
class SegmentReport:
    """The account of one segment: token counts, its retrieval score, and where its reused KV came from.

    tier: "device", "host" or "disk", the coldest of them; None if nothing was reused.
    recomputed_at: which tokens were recomputed, as places in the segment.
    """

    id: str
    title: str
    tokens: int
    reused: int
    recomputed: int
    tier: str | None = None
    score: float | None = None
    recomputed_at: Intervals = ()


Exactness = Literal["full", "dependency", "block", "packet"]
"""What an answer may be exact to: full attention; dependency attention; block attention, under which a chunk sees the
system prompt and itself, of a model that was trained for it; or the same between the soft tokens of packets."""


@dataclass(frozen=True)
class Plan:
    """The prefill that a strategy carried out: where decoding goes on from, and the account of it.

    spans: every key of the prompt as generated tokens see it.
    tail: slots of the request's own for the first generated tokens, up to the end of a page; it grows page by page.
    exact_to: None if it is approximate.
    logits: float32 [vocab] of the prompt's last token.
    figures: what else the strategy has to tell, by name.
    kept: tokens of the prompt that generated tokens see, if it was compressed.
    unfused: chunks that lacked the KV which they should have behind their neighbours; one that is exact needs none.
    """

    spans: tuple[Span, ...]
    tail: Run
    exact_to: Exactness | None
    reports: tuple[SegmentReport, ...]
    logits: NDArray[np.float32]
    figures: Mapping[str, float] = field(default_factory=dict)
    kept: int | None = None
    unfused: int = 0


Asked = Pass | Move | Compaction | Known
"""What a prefill yields."""

Prefill = Generator[Asked, Results, Plan]
"""A strategy at work: it yields passes and moves, receives their results, and returns the plan carried out."""
