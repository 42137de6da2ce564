"""A load in a worker thread: one stage of layers after the other, so that a pass can begin with the first.

While a stage is put together and brought to the device, the next one is read from disk. An entry on disk is checked as
a whole, so nothing is certain of its first stages before the last one is there (`core.tiers.TransferEngine.arrived`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Run
from ragjax.core.tiers import Copy, Load, Record
from ragjax.models.config import ModelConfig
from ragjax.store import host
from ragjax.store.codec import Arrays, Codec, cut, layers
from ragjax.store.device import Excerpt, cuts
from ragjax.store.host import HostEntry


@dataclass(frozen=True)
class Snapshot:
    """Copies of some pages (their numbers ascending), as they were at one moment."""

    pages: NDArray[np.int32]
    excerpts: list[Excerpt]

    @cached_property
    def _places(self) -> list[tuple[Excerpt, int]]:
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

    parts: for each stage, keys and values of each part, [L, pages of the part, K, C, D] each.
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
    return sum(stage.k_LPKCD.nbytes + stage.v_LPKCD.nbytes for excerpt in excerpts for stage in excerpt)


class PoolDevice(Protocol):
    """The part of the runner that a transfer engine uses."""

    config: ModelConfig
    page_size: int
    storage_dtype: np.dtype[Any]

    @property
    def stages(self) -> tuple[int, ...]: ...

    def extract(self, pages: NDArray[np.int32]) -> list[Excerpt]: ...

    def upload(self, k_LPKCD: NDArray[Any], v_LPKCD: NDArray[Any]) -> list[Excerpt]: ...

    def insert(self, pages: NDArray[np.int32], excerpts: Sequence[Excerpt], first: int = 0) -> None: ...

    def clear(self, pages: NDArray[np.int32]) -> None: ...


class Disk(Protocol):
    """Entries on disk; called from several threads. write: returns the bytes that it takes."""

    def write(self, record: Record, arrays: Mapping[str, NDArray[Any]]) -> int: ...

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[Arrays]: ...


@dataclass(frozen=True)
class Arrivals:
    """Makes excerpts for the device out of what loads name.

    readers: threads that read the entries of one load side by side. fillers: threads that bring the parts of a stage to
    the device, while readers may wait for the disk.
    """

    device: PoolDevice
    codec: Codec
    disk: Disk | None
    readers: Executor
    fillers: Executor

    @property
    def stages(self) -> int:
        return len(self.device.stages) - 1

    def of(self, job: Load, kept: Mapping[Copy, HostEntry]) -> Iterator[list[Excerpt]]:
        """Each stage's excerpts in order, on the job's pages; kept: the host entries that it reads."""
        codec = replace(self.codec, layers=self.codec.layers // self.stages)
        staging = Staging(codec, self.stages, len(job.run.pages), self.device.page_size)
        shares = {key: self._checked(key, *wanted, codec) for key, wanted in _wanted(job).items()}
        coming = self.readers.map(next, shares.values())
        for stage in range(self.stages):
            read = dict(zip(shares, coming, strict=True))
            if stage + 1 < self.stages:
                coming = self.readers.map(next, shares.values())
            yield self._bring(stage, job, staging, kept, read)
        for own in shares.values():
            next(own, None)  # lets it end

    def _checked(self, key: bytes, tokens: int, expected: Record | None, codec: Codec) -> Iterator[Arrays]:
        assert self.disk is not None
        for arrays in self.disk.read_shares(key, self.stages, expected):
            codec.check(arrays, tokens)
            yield arrays

    def _bring(
        self, stage: int, job: Load, staging: Staging, kept: Mapping[Copy, HostEntry], read: Mapping[bytes, Arrays]
    ) -> list[Excerpt]:
        depth = self.codec.layers // self.stages

        def fill(piece: Copy, end: int) -> None:
            if isinstance(piece.entry, bytes):
                arrays = read[piece.entry]
            else:
                arrays = layers(kept[piece].read(), stage * depth, (stage + 1) * depth)
            kv_LKTD = self.codec.decode(cut(arrays, piece.begin, piece.begin + piece.length))
            staging.put(stage, end - piece.length, kv_LKTD)

        list(self.fillers.map(fill, job.pieces, accumulate(piece.length for piece in job.pieces)))
        uploaded = self.fillers.map(lambda part: self.device.upload(*part), staging.parts[stage])
        return list(chain.from_iterable(uploaded))


def _wanted(job: Load) -> dict[bytes, tuple[int, Record | None]]:
    """Tokens that are read of each entry on disk, and its record; several pieces of the job may lie in one entry."""
    found: dict[bytes, tuple[int, Record | None]] = {}
    for piece in job.pieces:
        if isinstance(piece.entry, bytes):
            end, _ = found.get(piece.entry, (0, None))
            found[piece.entry] = max(piece.begin + piece.length, end), piece.record
    return found
