"""One step of a batch: the compiled shapes, and the host arrays that a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core.errors import RequestError
from ragjax.core.passes import Measure, Run, Span
from ragjax.core.prompt import NEVER

PREFILL_ROWS = 8
"""Least rows of a block that prefills: smaller blocks decode."""

SHARING_ROWS = 16
"""Most rows of a block that look at shared keys together: the least rows that a GPU's matrix product takes."""


class RowShape(NamedTuple):
    """Rows of a compiled step. A block holds rows of one request."""

    rows: int  # all of them; no two shapes of a grid have equally many
    block: int  # rows of a block
    single: int = 0  # leading rows in blocks of one, for decoding tokens that share the step with prefill
    shares: bool = False  # rows in blocks of one look together at keys that they share

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Rows, and rows of a block, of each part of the step that has blocks of its own size."""
        rest = (self.rows - self.single, self.block)
        return ((self.single, 1), rest) if self.single else (rest,)

    @property
    def ones(self) -> int:
        """Leading rows in blocks of one."""
        return self.rows if self.block == 1 else self.single

    @property
    def sharing(self) -> tuple[int, int]:
        """Places for rows in blocks of one that look at keys which they share, and places of a block; (0, 1): none."""
        if not self.shares or self.ones < 2:
            return 0, 1
        block = min(self.ones, SHARING_ROWS)
        return -(-self.ones // block) * block, block

    @property
    def mixed(self) -> bool:
        """True if decoding tokens and prefill share the step."""
        return self.single > 0


@dataclass(frozen=True)
class Grid:
    """Shapes that are compiled ahead.

    rows: (rows of a step, rows of a block, leading rows in blocks of one), ascending by what a step holds.
    entries: entries of a step's page table, ascending; one request has to fit into the last.
    logits: rows whose logits are computed together, ascending.
    segments: the least bucket of segments, where attention is measured by segment; others are 4, 16, ... times as many.
    wide: entries of steps in which many requests decode (0: no more than the last of `entries`).
    padding: what a row of padding costs, in rows that hold tokens.
    """

    rows: tuple[RowShape, ...] = (
        *(RowShape(2, 2), RowShape(7, 7), RowShape(8, 1), RowShape(16, 1)),
        *(RowShape(16 + 64, 32, 16), RowShape(16 + 256, 128, 16)),
        *(RowShape(32, 16), RowShape(128, 32), RowShape(512, 128)),
    )
    entries: tuple[int, ...] = (256,)
    logits: tuple[int, ...] = (2, 8, 16)
    segments: int = 16
    wide: int = 0
    padding: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(RowShape(*shape) for shape in self.rows))
        if len({shape.rows for shape in self.rows}) < len(self.rows):
            raise ValueError(f"two shapes of {self.rows} have equally many rows")
        for shape in self.rows:
            if any(rows < 1 or rows % block for rows, block in shape.parts):
                raise ValueError(f"{shape} has no whole number of blocks")

    @staticmethod
    def gpu_rows(group: int) -> tuple[RowShape, ...]:
        """Row shapes for a GPU: larger ones, in blocks that with `group` query heads a KV head fill 128 rows.

        Blocks have at least `PREFILL_ROWS`, so those of a wider group fill several times 128.
        """
        block = max(PREFILL_ROWS, 128 // (1 << (min(group, 128) - 1).bit_length()))
        decode = tuple(RowShape(rows, 1, shares=True) for rows in (8, 64, 256))
        mixed = tuple(RowShape(64 + rows, block, 64, shares=True) for rows in (512, 2048))
        return (*decode, *mixed, *(RowShape(rows, block) for rows in (128, 512, 2048, 8192)))

    def shape(self, rows: int) -> RowShape:
        return {shape.rows: shape for shape in self.rows}[rows]

    def sharing(self, rows: int) -> tuple[int, int]:
        return self.shape(rows).sharing

    def entries_of(self, shape: RowShape) -> tuple[int, ...]:
        """Entries that steps of a shape are compiled for, ascending."""
        requests = shape.single or shape.rows // shape.block
        few = requests <= (16 if shape.mixed else 8)
        if few or self.wide <= self.entries[-1] or (shape.block >= PREFILL_ROWS and not shape.mixed):
            return self.entries
        return self.entries[-1], self.wide

    def logits_of(self, shape: RowShape) -> int:
        """Rows of a shape whose logits are computed together: all that decode, and the last of each prefill."""
        alone = shape.block < PREFILL_ROWS and not shape.mixed
        wanted = shape.rows if alone else shape.single + (shape.rows - shape.single) // shape.block
        return next((n for n in self.logits if n >= wanted), self.logits[-1])

    @property
    def least(self) -> tuple[RowShape, ...]:
        """Shapes that can answer any prompt: one for decoding tokens, and one for prefill, which is cut to its rows."""
        decode = [shape for shape in self.rows if shape.block == 1]
        prefill = [shape for shape in self.rows if shape.block >= PREFILL_ROWS and not shape.mixed]
        return (decode[0], prefill[0]) if decode and prefill else self.rows

    @staticmethod
    def fit(values: Iterable[int], need: int) -> int:
        """The smallest of ascending `values` that holds `need`."""
        for value in values:
            if value >= need:
                return value
        raise ValueError(f"{need} exceeds the largest compiled bucket")

    def fit_segments(self, need: int) -> int:
        bucket = self.segments
        while bucket < need:
            bucket *= 4
        return bucket


@dataclass(frozen=True)
class StepMeasure:
    """Measurement in some layers (half-open) of a step, and the host arrays it takes, int32 [T] and [S, C].

    arrays: asking_T (scores by key): 1 for a row that counts. segment_SC (scores by segment): segment of each slot,
        -1 for none; segment_T (SEGMENT_SCORE): of each row. stale_T, offset_T (DEVIATION): the slot that the row's KV
        is compared with, -1 for none, and the RoPE offset that rotates its key to the row's position.
    """

    what: Measure  # any but LOGITS; VALUED_SCORE brings KEY_SCORE along
    layers: tuple[int, int]
    arrays: Mapping[str, NDArray[np.int32]]
    segments: int = 0  # most segments of a prompt, a bucket of the grid; 0 if the measure has none


class Residual(Protocol):
    """Residuals of a step's rows after its last layer, float32 [T, E]; on the device until somebody reads them."""

    def __len__(self) -> int: ...

    def __array__(self, dtype: np.dtype[Any] | None = None) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Step:
    """Host arrays of one step over a batch of requests, int32, padded to buckets of the grid.

    One per row [T], one per entry [S] or slot [S, C] of the page table, one per place [O] (`RowShape.sharing`).
    """

    token_T: NDArray[np.int32]
    index_T: NDArray[np.int32]  # -1 is padding
    position_T: NDArray[np.int32]
    request_T: NDArray[np.int32]
    slot_T: NDArray[np.int32]  # page * C + slot, where the row's KV is written (padding: page 0, which nobody reads)
    page_S: NDArray[np.int32]
    offset_S: NDArray[np.int32]
    request_S: NDArray[np.int32]  # -1 is unused
    index_SC: NDArray[np.int32]
    hide_from_SC: NDArray[np.int32]
    hide_until_SC: NDArray[np.int32]
    # rows in blocks of one that look at shared keys too (-1: none); block n of places reads entries of request T + n
    sharer_O: NDArray[np.int32]
    layers: tuple[int, int] | None = None  # half-open range to run, from the first layer of a stage on (None: all)
    # What the rows bring from the layers before, if these are not the first: an array, or what a step of as many rows
    # left, if each row is where it was in that step.
    residual_TE: NDArray[np.float32] | Residual | None = None
    measure: StepMeasure | None = None


STEP_ARRAYS = (
    *("token_T", "index_T", "position_T", "request_T", "slot_T"),
    *("page_S", "offset_S", "request_S", "index_SC", "hide_from_SC", "hide_until_SC"),
    "sharer_O",
)
"""The arrays of a `Step` that every step has."""

UNUSED = {
    **dict.fromkeys(("index_T", "request_T", "request_S", "sharer_O", "segment_T", "segment_SC", "stale_T"), -1),
    "index_SC": int(NEVER),
}
"""What arrays of a step and of its measure hold for rows of padding and unused entries, where it is not 0."""


def padding(
    names: Iterable[str], rows: int, entries: int, page_size: int, places: int = 0
) -> dict[str, NDArray[np.int32]]:
    """Arrays of a step, by name, that holds no row of a request and no key."""
    sizes = {"T": (rows,), "S": (entries,), "SC": (entries, page_size), "O": (places,)}
    return {name: np.full(sizes[name.rsplit("_", 1)[1]], UNUSED.get(name, 0), np.int32) for name in names}


@dataclass(frozen=True)
class Adjusted:
    """Tokens whose logits change before one is chosen, [A] each."""

    token_A: NDArray[np.int32]  # none twice
    factor_A: NDArray[np.float32]  # what a logit is divided by if above 0, and multiplied by otherwise
    add_A: NDArray[np.float32]  # what is added then


@dataclass(frozen=True)
class Draw:
    temperature: float = 0.0
    top_k: int = 0  # likeliest tokens that may be drawn (0: all)
    top_p: float = 1.0  # mass that the likeliest of these reach together
    key: int = 0  # of the noise that draws, 64 bits
    adjusted: Adjusted | None = None
    logprobs: bool = False  # log-probabilities are wanted
    # which tokens may be chosen, [W]: token t by bit t % 32 of word t // 32, none beyond the last word (None: all may)
    allowed: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Chosen:
    token: int
    logprob: float | None = None  # its natural-log probability by the model alone, if it was wanted
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with theirs, likeliest first


@dataclass(frozen=True)
class StepLimits:
    entries: int  # of its page table; an entry is one page at one RoPE offset
    page_size: int  # slots of a page

    def entries_for(self, tokens: int, runs: int) -> int:
        return -(-tokens // self.page_size) + 2 * runs

    def holds(self, tokens: int, runs: int) -> bool:
        """Tell if a step surely reads so many tokens in so many runs."""
        return self.entries_for(tokens, runs) <= self.entries

    def room_beside(self, tokens: int, runs: int) -> int:
        """Entries that are left beside so many tokens in so many runs; below 0 if these may not fit."""
        return self.entries - self.entries_for(tokens, runs)

    def leading(self, runs: Iterable[Run], tokens: int, room: int | None = None) -> tuple[int, int]:
        """Number of runs of a prefix to read, from its first, and their tokens; the rest of `tokens` is computed.

        A prefix that many requests made piece by piece lies scattered: each piece takes a page, and an entry. room:
        entries for it (all, if None).
        """
        room = self.entries if room is None else room
        used, found, best = 0, 0, (0, 0)
        for i, run in enumerate(runs, 1):
            used, found = used + len(run.pages), found + run.length
            if used + -(-(tokens - found) // self.page_size) < room:  # one is left for a page that two spans share
                best = i, found
        return best

    def densest(self, found: Mapping[int, Sequence[Span]], room: int) -> frozenset[int]:
        """Choose the span lists to read through `room` entries; entries with the fewest tokens are left out first.

        Short runs that many requests made lie scattered, a page each. A span that stands twice at one offset takes two
        entries.
        """
        tokens = Counter[int]()
        latest: dict[tuple[int, int], tuple[int, int]] = {}  # page and offset -> entry filled last, its slots as bits
        read: dict[int, set[int]] = {i: set() for i in found}
        for i, spans in found.items():
            for span in spans:
                for at, page in enumerate(span.run.pages):
                    low = max(span.run.start - at * self.page_size, 0)
                    high = min(span.run.start + span.run.length - at * self.page_size, self.page_size)
                    slots = (1 << high) - (1 << low)
                    entry, taken = latest.get((page, span.offset), (len(tokens), 0))
                    if taken & slots:
                        entry, taken = len(tokens), 0
                    latest[page, span.offset] = entry, taken | slots
                    tokens[entry] += high - low
                    read[i].add(entry)
        kept = {entry for entry, _ in tokens.most_common(max(room, 0))}
        return frozenset(i for i, entries in read.items() if entries <= kept)

    def check(self, entries: int) -> None:
        if entries > self.entries:
            raise RequestError(
                f"the prompt is in too many pieces for one step: {entries} entries of the page table, at most "
                f"{self.entries}. Shorten the prompt or use fewer chunks",
                param="messages",
                code="context_length_exceeded",
            )
