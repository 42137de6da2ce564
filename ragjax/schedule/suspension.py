"""A decoding request gives its pages back, bit for bit in host memory, and goes on later with pages of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Run, Span
from ragjax.reuse.base import Allocation
from ragjax.schedule.state import Paused, RequestState


class Copier(Protocol):
    """Whoever owns the pool's arrays: it copies pages, int32 [P], to host memory, and puts copies into pages.

    lost: whether the arrays are gone.
    """

    @property
    def lost(self) -> bool: ...

    def download(self, pages: NDArray[np.int32]) -> object: ...

    def restore(self, pages: NDArray[np.int32], copies: Any) -> None: ...


def pause(state: RequestState, copier: Copier) -> None:
    """Copy all KV that its next tokens read to host memory, bit for bit, and give every page back.

    Only between two steps, once its prompt is computed. `resume` or `RequestState.stop` comes next.
    """
    assert state.plan is not None and state.allocation is not None
    spans = (*state.plan.spans, Span(np.zeros(0, np.int32), state.plan.tail))
    pages = np.unique(np.array([page for span in spans for page in span.run.pages], np.int32))
    state.paused = Paused(pages, copier.download(pages), state.allocation.decode_tokens)
    state.allocation.close()
    state.allocation = None
    state.times.pauses += 1


def resume(state: RequestState, allocation: Allocation, copier: Copier) -> None:
    """Have pages of its own that hold the same bits, and go on as if nothing had been.

    What it read from the cache is its own copy now; its next tokens are the same, whatever its strategy measured.

    Raises:
        OutOfPages: if there is no room now; it stays paused.
    """
    assert state.paused is not None and state.plan is not None
    paused = state.paused
    try:
        run = allocation.reserve(len(paused.pages) * allocation.page_size, allocation.spare)
        copier.restore(np.array(run.pages, np.int32), paused.copies)
    except BaseException:
        allocation.close()
        raise
    state.paused = None
    allocation.decode_tokens, allocation.cold = paused.decode_tokens, False
    state.adopt(allocation)
    _relocate(state, dict(zip(paused.pages.tolist(), run.pages, strict=True)))


def _relocate(state: RequestState, moved: Mapping[int, int]) -> None:
    """Read and write pages under their new numbers."""
    assert state.plan is not None

    def relocated(run: Run) -> Run:
        return replace(run, pages=tuple(moved[page] for page in run.pages))

    spans = tuple(replace(span, run=relocated(span.run)) for span in state.plan.spans)
    state.plan = replace(state.plan, spans=spans, tail=relocated(state.plan.tail))
    state.tail_N = state.plan.tail.slots(state.reader.allocation.page_size)
    if state.rows is not None:
        state.rows.relocate(moved, state.reader.allocation.page_size)
