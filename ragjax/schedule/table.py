"""The page table of one request: which pages a step reads for it, and which token each slot holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragjax.core import NEVER, Run, Span
from ragjax.core.layout import LayerTable


class PageTable:
    """Spans as entries: one per page and offset, so that short runs share one; int32 arrays [S] and [S, C].

    by_layer: of its first entries, if the first span has a layout.
    """

    def __init__(self, spans: Sequence[Span], page_size: int):
        entries = _Entries()
        slots = [entries.take(span, page_size) for span in spans]
        total = len(entries.pages)
        self.page_S = np.array(entries.pages, np.int32)
        self.offset_S = np.array(entries.offsets, np.int32)
        self.index_SC = np.full((total, page_size), NEVER, np.int32)
        self.hide_from_SC = np.zeros((total, page_size), np.int32)
        self.hide_until_SC = np.zeros((total, page_size), np.int32)
        for span, slot in zip(spans, slots, strict=True):
            self.index_SC.reshape(-1)[slot] = span.indices
            if span.hidden[0] < span.hidden[1]:
                self.hide_from_SC.reshape(-1)[slot] = span.hidden[0]
                self.hide_until_SC.reshape(-1)[slot] = span.hidden[1]
        self.by_layer = _by_layer(spans, page_size)
        self._last = slots[-1] if slots else np.zeros(0, np.intp)
        self._lasting: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.page_S)

    @property
    def lasting(self) -> NDArray[np.int64]:
        """The entries before those of the last span, as hashes: equal where entries are equal in all arrays."""
        if self._lasting is None:
            end = int(self._last.min()) // self.index_SC.shape[1] if len(self._last) else len(self)
            arrays = (self.index_SC, self.hide_from_SC, self.hide_until_SC)
            places = zip(self.page_S[:end].tolist(), self.offset_S[:end].tolist(), strict=True)
            slots = zip(*([x_C.tobytes() for x_C in x_SC[:end]] for x_SC in arrays), strict=True)
            self._lasting = np.array([hash(entry) for entry in zip(places, slots, strict=True)], np.int64)
        return self._lasting

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Read pages under their new numbers."""
        self.page_S = np.array([moved[page] for page in self.page_S.tolist()], np.int32)
        if self.by_layer is not None:
            page_LS = np.vectorize(moved.__getitem__, otypes=[np.int32])(self.by_layer.page_LS)
            self.by_layer = replace(self.by_layer, page_LS=page_LS)
        self._lasting = None

    def show(self, token: int, index: int) -> None:
        """Give a token of the last span its index in the prompt."""
        self.index_SC.reshape(-1)[self._last[token]] = index

    def grow(self, run: Run) -> None:
        """More slots behind those of the last span: a run of whole pages, at offset 0; tokens have no index yet."""
        total, page_size = self.index_SC.shape
        more = len(run.pages)
        hidden_SC, zeros_SC = np.full((more, page_size), NEVER, np.int32), np.zeros((more, page_size), np.int32)
        self.page_S = np.concatenate([self.page_S, np.array(run.pages, np.int32)])
        self.offset_S = np.concatenate([self.offset_S, np.zeros(more, np.int32)])
        self.index_SC = np.concatenate([self.index_SC, hidden_SC])
        self.hide_from_SC = np.concatenate([self.hide_from_SC, zeros_SC])
        self.hide_until_SC = np.concatenate([self.hide_until_SC, zeros_SC])
        self._last = np.concatenate([self._last, np.arange(total * page_size, (total + more) * page_size)])

    def by_index(self, values_SC: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Sum values of slots by their index in the prompt: [..., S, C] to [..., size]."""
        live = self.index_SC.reshape(-1) < size
        flat = values_SC.reshape(*values_SC.shape[:-2], -1)[..., live]
        out = np.zeros((*flat.shape[:-1], size), np.float32)
        np.add.at(out.T, self.index_SC.reshape(-1)[live], flat.T)  # axes turned: the index comes first
        return out


class _Entries:
    """Entries as spans take them. Slots of a chunk that stands twice at one offset are taken in entries of their
    own.
    """

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.offsets: list[int] = []
        self._taken: list[NDArray[np.bool_]] = []
        self._open: dict[tuple[int, int], int] = {}

    def take(self, span: Span, page_size: int) -> NDArray[np.intp]:
        """Index of each of the span's slots in [S, C], flat."""
        begin, end, found = span.run.start, span.run.start + span.run.length, []
        for i, page in enumerate(span.run.pages):
            low, high = max(begin - i * page_size, 0), min(end - i * page_size, page_size)
            found.append(self._entry(page, span.offset, low, high, page_size) * page_size + np.arange(low, high))
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    def _entry(self, page: int, offset: int, low: int, high: int, page_size: int) -> int:
        entry = self._open.get((page, offset))
        if entry is None or self._taken[entry][low:high].any():
            entry = self._open[page, offset] = len(self.pages)
            self.pages.append(page)
            self.offsets.append(offset)
            self._taken.append(np.zeros(page_size, bool))
        self._taken[entry][low:high] = True
        return entry


def _by_layer(spans: Sequence[Span], page_size: int) -> LayerTable | None:
    """Of the first span's entries. Its last page may be named more than once: the table takes the first of them."""
    if not spans or (layout := spans[0].layout) is None:
        return None
    pages = spans[0].run.pages
    return layout.table(pages[: layout.containers(page_size)], page_size)


def slots_of(spans: Iterable[Span], size: int, page_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Slot of each index of the prompt, -1 where there is none, and RoPE offset, int32 [size]."""
    slot, offset = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    for span in spans:
        live = span.indices < size
        slot[span.indices[live]] = span.run.slots(page_size)[live]
        offset[span.indices[live]] = span.offset
    return slot, offset
