"""One step of a batch: the compiled shapes, and the host arrays that a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragjax.core.passes import Measure


@dataclass(frozen=True)
class Grid:
    """Shapes that are compiled ahead: row buckets, each with its block of rows, entry buckets, logit buckets.

    rows: (rows of a step, rows of a block), ascending; a block holds rows of one request.
    entries: entries of a step, ascending. logits: rows whose logits are computed together, ascending.
    segments: the least bucket of segments, where attention is measured by segment; others are 4, 16, ... times as many.
    """

    rows: tuple[tuple[int, int], ...] = ((2, 2), (8, 1), (32, 32), (128, 32), (336, 112), (512, 128))
    entries: tuple[int, ...] = (64, 256)
    logits: tuple[int, ...] = (2, 8, 32)
    segments: int = 16

    @staticmethod
    def gpu_rows(group: int) -> tuple[tuple[int, int], ...]:
        """Row buckets for a GPU: larger ones, in blocks that with `group` query heads a KV head fill 128 rows."""
        block = 128 // (1 << (min(group, 128) - 1).bit_length())
        return ((8, 1), (64, 1), (128, block), (512, block), (2048, block), (8192, block))

    @staticmethod
    def fit(values: Iterable[int], need: int) -> int:
        """The smallest of ascending `values` that holds `need`.

        Raises:
            ValueError: if none does.
        """
        for value in values:
            if value >= need:
                return value
        raise ValueError(f"{need} exceeds the largest compiled bucket")

    def fit_segments(self, need: int) -> int:
        """The smallest bucket that holds so many segments."""
        bucket = self.segments
        while bucket < need:
            bucket *= 4
        return bucket


@dataclass(frozen=True)
class StepMeasure:
    """What a step measures in some of its layers (half-open), and the host arrays it takes, int32 [T] and [S, C].

    what: any but LOGITS; VALUED_SCORE brings KEY_SCORE along. segments: most segments of a prompt, a bucket of the
        grid; 0 if the measure has none.
    arrays: asking_T (scores by key): 1 for a row that counts. segment_SC (scores by segment): segment of each slot,
        -1 for none; segment_T (SEGMENT_SCORE): of each row. stale_T, offset_T (DEVIATION): the slot that the row's KV
        is compared with, -1 for none, and the RoPE offset that rotates its key to the row's position.
    """

    what: Measure
    layers: tuple[int, int]
    arrays: Mapping[str, NDArray[np.int32]]
    segments: int = 0


@dataclass(frozen=True)
class Step:
    """Host arrays of one step over a batch of requests, int32, padded to buckets of the grid.

    token, index, position, request, slot: one per row [T]; index -1 is padding; slot = page * C + slot is where the
        row's KV is written (padding: page 0, which nobody reads).
    page, offset, request: one per entry [S]; request -1 is unused.
    index, hide_from, hide_until: one per slot [S, C].
    layers: half-open range to run, from the first layer of a stage on (None: all).
    residual_TE: what the rows bring from the layers before, if these are not the first.
    measure: what is measured, if anything.
    """

    token_T: NDArray[np.int32]
    index_T: NDArray[np.int32]
    position_T: NDArray[np.int32]
    request_T: NDArray[np.int32]
    slot_T: NDArray[np.int32]
    page_S: NDArray[np.int32]
    offset_S: NDArray[np.int32]
    request_S: NDArray[np.int32]
    index_SC: NDArray[np.int32]
    hide_from_SC: NDArray[np.int32]
    hide_until_SC: NDArray[np.int32]
    layers: tuple[int, int] | None = None
    residual_TE: NDArray[np.float32] | None = None
    measure: StepMeasure | None = None
