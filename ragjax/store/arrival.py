"""How a load is carried out in a worker: a stage of layers after the other, so that a pass can begin with the first.

While a stage is put together and brought to the device, the next one is read from disk. An entry on disk is checked as
a whole, so nothing is certain of its first stages before the last one is there (`core.tiers.TransferEngine.arrived`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core.tiers import Copy, Load, Record
from ragjax.models.config import ModelConfig
from ragjax.store.codec import Arrays, Codec, cut, layers
from ragjax.store.device import Excerpt
from ragjax.store.host import Entry
from ragjax.store.pages import Staging
from ragjax.store.traffic import Traffic, TrafficMeter


class Device(Protocol):
    """What a transfer engine needs of the runner; see there."""

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
    """Entries on disk; called from several threads."""

    def write(self, record: Record, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Keep the arrays, views of longer ones; returns the bytes they take."""
        ...

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[Arrays]:
        """The arrays of an entry in equal shares of their layers, the first ones first.

        Raises, before the last share, if the entry is missing, damaged, or not what is expected.
        """
        ...


@dataclass
class Source:
    """An entry on disk as a load reads it, in so many shares; a read that fails is begun again.

    tokens: so many of its first ones are wanted. codec: of the layers of one share.
    """

    disk: Disk
    key: bytes
    expected: Record | None
    tokens: int
    codec: Codec
    count: int
    retries: int
    _given: list[Arrays] = field(default_factory=list)
    _shares: Iterator[Arrays] | None = None
    _errors: list[Exception] = field(default_factory=list)
    _failed: bool = False
    _seconds: float = 0.0

    def next(self) -> Arrays:
        """The next share.

        Raises:
            Exception: that of the first read, once there were too many; a damaged entry is missing from then on.
        """
        start = time.monotonic()
        try:
            arrays = self._read()
            while arrays is None:
                arrays = self._read()
            self.codec.check(arrays, self.tokens)
        except Exception:
            self._failed = True
            raise
        finally:
            self._seconds += time.monotonic() - start
        self._given.append(arrays)
        if len(self._given) == self.count and self._shares is not None:
            next(self._shares, None)  # lets it end
        return arrays

    def traffic(self) -> Traffic:
        """What was read: one job, if all of it was."""
        moved = Traffic(seconds=self._seconds, failures=int(self._failed), retries=min(len(self._errors), self.retries))
        if len(self._given) == self.count:
            moved.jobs, moved.bytes = 1, sum(x.nbytes for arrays in self._given for x in arrays.values())
        return moved

    def _read(self) -> Arrays | None:
        """The next share; None if it has to be tried again."""
        try:
            if self._shares is None:
                self._shares = self.disk.read_shares(self.key, self.count, self.expected)
                for before in self._given:
                    _require_same(before, next(self._shares))
            return next(self._shares)
        except Exception as error:
            self._shares = None
            self._errors.append(error)
            if len(self._errors) > self.retries:
                raise self._errors[0] from None
            return None


@dataclass(frozen=True)
class Arrivals:
    """Makes excerpts for the device out of what loads name.

    codec: of all layers. readers: threads that read the entries of one load side by side. fillers: threads that bring
    the parts of a stage to the device, while readers may wait for the disk. retries: further reads after one failed.
    """

    device: Device
    codec: Codec
    disk: Disk | None
    readers: Executor
    fillers: Executor
    meter: TrafficMeter
    retries: int

    @property
    def stages(self) -> int:
        """How many the layers fall into."""
        return len(self.device.stages) - 1

    def of(self, job: Load, kept: Mapping[Copy, Entry]) -> Iterator[list[Excerpt]]:
        """Each stage's excerpts in order, on the job's pages; kept: the host entries that it reads.

        Raises:
            Exception: whatever a read, an entry or the device fails by.
        """
        codec = replace(self.codec, layers=self.codec.layers // self.stages)
        staging = Staging(codec, self.stages, len(job.run.pages), self.device.page_size)
        sources, moved = self._sources(job, codec), Traffic(jobs=1, bytes=staging.nbytes)
        try:
            coming = self.readers.map(Source.next, sources.values())
            for stage in range(self.stages):
                read = dict(zip(sources, coming, strict=True))
                if stage + 1 < self.stages:
                    coming = self.readers.map(Source.next, sources.values())
                excerpts = self._bring(stage, job, staging, kept, read, moved)
                yield excerpts
            self.meter.add("host_to_device", moved)
        finally:
            for source in sources.values():
                self.meter.add("disk_to_host", source.traffic())

    def _sources(self, job: Load, codec: Codec) -> dict[bytes, Source]:
        """One for each entry on disk, however many of the job's pieces lie in it."""
        ends: dict[bytes, int] = {}
        expected: dict[bytes, Record | None] = {}
        for piece in job.pieces:
            if isinstance(piece.entry, bytes):
                ends[piece.entry] = max(piece.begin + piece.length, ends.get(piece.entry, 0))
                expected[piece.entry] = piece.record
        return {
            key: Source(self._disk, key, expected[key], end, codec, self.stages, self.retries)
            for key, end in ends.items()
        }

    @property
    def _disk(self) -> Disk:
        assert self.disk is not None
        return self.disk

    def _bring(
        self,
        stage: int,
        job: Load,
        staging: Staging,
        kept: Mapping[Copy, Entry],
        read: Mapping[bytes, Arrays],
        moved: Traffic,
    ) -> list[Excerpt]:
        """One stage of all pieces, on the device; `moved` takes the time."""
        depth = self.codec.layers // self.stages
        start = time.monotonic()

        def fill(piece: Copy, end: int) -> None:
            if isinstance(piece.entry, bytes):
                arrays = read[piece.entry]
            else:
                arrays = layers(kept[piece].read(), stage * depth, (stage + 1) * depth)
            kv_LKTD = self.codec.decode(cut(arrays, piece.begin, piece.begin + piece.length))
            staging.put(stage, end - piece.length, kv_LKTD)

        try:
            list(self.fillers.map(fill, job.pieces, accumulate(piece.length for piece in job.pieces)))
            uploaded = self.fillers.map(lambda part: self.device.upload(*part), staging.parts[stage])
            return list(chain.from_iterable(uploaded))
        except Exception:
            self.meter.add("host_to_device", Traffic(failures=1))
            raise
        finally:
            moved.seconds += time.monotonic() - start


def _require_same(before: Arrays, again: Arrays) -> None:
    """What was given already must be what is read now.

    Raises:
        ValueError: if it is not.
    """
    if before.keys() != again.keys() or any(before[name].tobytes() != again[name].tobytes() for name in before):
        raise ValueError("an entry changed while it was read")
