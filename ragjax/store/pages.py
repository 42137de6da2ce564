"""Between pages in host memory, as the device's pool has them, and the tokens of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Run
from ragjax.store import host
from ragjax.store.codec import Codec
from ragjax.store.device import Excerpt, cuts


@dataclass(frozen=True)
class Snapshot:
    """Copies of some pages (their numbers ascending), as they were at one moment."""

    pages: NDArray[np.int32]
    excerpts: list[Excerpt]

    @cached_property
    def _places(self) -> list[tuple[Excerpt, int]]:
        """Where each page is: the excerpt, and its index there."""
        return [(excerpt, i) for excerpt in self.excerpts for i in range(excerpt[0].k_LPKCD.shape[1])]

    def read(self, run: Run, codec: Codec, page_size: int) -> list[NDArray[Any]]:
        """Keys and values of a run on these pages, [L, K, n, D] each; waits until they are in host memory."""
        kv_LKTD = [np.empty((codec.layers, codec.heads, run.length, codec.dim), codec.dtype) for _ in "kv"]
        for page, slots, tokens in spread(run.start, run.length, page_size):
            excerpt, index = self._places[int(np.searchsorted(self.pages, run.pages[page]))]
            layers = range(0, codec.layers, excerpt[0].k_LPKCD.shape[0])
            for first, stage in zip(layers, excerpt, strict=True):
                for x_LKTD, copy in zip(kv_LKTD, (stage.k_LPKCD, stage.v_LPKCD), strict=True):
                    x_LPKCD = host.to_numpy(copy, codec.dtype)
                    x_LKTD[first : first + len(x_LPKCD), :, tokens] = x_LPKCD[:, index, :, slots]
        return kv_LKTD


class Staging:
    """Pages in host memory that pieces of a run are put into, in the parts that the device takes at once.

    codec: of the layers of one stage, L. parts: for each stage, keys and values of each part,
    [L, pages of the part, K, C, D] each.
    """

    def __init__(self, codec: Codec, stages: int, pages: int, page_size: int):
        """So many pages of zeros: slots that no token fills must be finite.

        All lie in one array, which has huge pages if it is large: the rest of their memory is quicker to come by.
        """
        page, depth = (codec.heads, page_size, codec.dim), codec.layers
        whole = np.zeros((stages, 2, depth * pages, *page), codec.dtype)
        slices = [slice(depth * part.start, depth * part.stop) for part in cuts(pages)]
        self.parts = [[[x[part].reshape(depth, -1, *page) for x in stage] for part in slices] for stage in whole]
        self._page_size = page_size
        self._places = [(number, i) for number, part in enumerate(cuts(pages)) for i in range(part.stop - part.start)]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(x.nbytes for stage in self.parts for part in stage for x in part)

    def put(self, stage: int, begin: int, kv_LKTD: Iterable[NDArray[Any]]) -> None:
        """Put keys and values of some tokens where token `begin` of the run, and those after it, belong."""
        for x, x_LKTD in enumerate(kv_LKTD):
            for page, slots, tokens in spread(begin, x_LKTD.shape[2], self._page_size):
                part, i = self._places[page]
                self.parts[stage][part][x][:, i, :, slots] = x_LKTD[:, :, tokens]


def spread(start: int, length: int, page_size: int) -> Iterator[tuple[int, slice, slice]]:
    """Tokens from slot `start` of the first page on: index of each page, slots on it, tokens in them."""
    end = start + length
    for page in range(start // page_size, -(-end // page_size)):
        first, last = max(start, page * page_size), min(end, (page + 1) * page_size)
        yield page, slice(first - page * page_size, last - page * page_size), slice(first - start, last - start)


def nbytes(excerpts: Iterable[Excerpt]) -> int:
    """Bytes of all pages."""
    return sum(stage.k_LPKCD.nbytes + stage.v_LPKCD.nbytes for excerpt in excerpts for stage in excerpt)
