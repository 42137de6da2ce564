"""Carries out the cache's orders (`core.tiers.TransferEngine`): KV from the device to host memory, to disk, and back.

The thread that owns the pool only dispatches; waiting, encoding and files are for worker threads. Saves, writes and
loads have threads of their own, so that a load, which a request waits for, queues behind other loads only. No job waits
for another in a worker: it is queued once the entries that it needs are there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition

import numpy as np

from ragjax.core import AtRest
from ragjax.core.tiers import Copy, Done, Job, Load, Save, TransferEngine, Write
from ragjax.store import host
from ragjax.store.codec import Codec, cut, rest_dtype
from ragjax.store.device import Excerpt
from ragjax.store.host import HostEntry, HostStore
from ragjax.store.load import Arrivals, Disk, PoolDevice, Snapshot, nbytes

WORKERS = 2
"""Threads for loads, and as many for what they consist of; saves and writes have one each."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _LoadedStage:
    number: int
    excerpts: Sequence[Excerpt]


@dataclass(eq=False)
class _Begun:
    job: Job
    keeps: Sequence[HostEntry]
    start: float = field(default_factory=time.monotonic)
    stages: int = 0
    error: str | None = None
    given_up: bool = False


class KVTransfer(TransferEngine):
    """Moves KV between the tiers of one runner.

    `Done.bytes` are bytes at rest for saves and writes, and bytes put on the device for loads. The stages of a load are
    inserted as they arrive; if it comes to nothing, and some of it came from disk, zeros take their place. notify:
    called, in any thread, when there is something to poll; must return at once. lossy: whether what it saves loses
    precision.
    """

    def __init__(self, device: PoolDevice, kind: AtRest = "raw", *, disk: Disk | None = None):
        config = device.config
        dtype = rest_dtype(device.storage_dtype)
        self._codec = Codec(kind, config.num_layers, config.num_kv_heads, config.head_dim, dtype)
        self.lossy = kind != "raw"
        self.host = HostStore()
        self._device = device
        self._disk = disk
        self.notify: Callable[[], None] = lambda: None
        self._savers = ThreadPoolExecutor(1, "ragjax-save")
        self._writers = ThreadPoolExecutor(1, "ragjax-write")
        self._loaders = ThreadPoolExecutor(WORKERS, "ragjax-load")
        self._readers = ThreadPoolExecutor(WORKERS, "ragjax-read")  # parts of one load are done side by side
        self._fillers = ThreadPoolExecutor(WORKERS, "ragjax-fill")
        self._change = Condition()  # guards the counters and all below
        self._outstanding = 0
        self._backlog = 0
        self._loading: dict[int, _Begun] = {}
        self._closed = False
        self._ready: list[tuple[_Begun, Done | _LoadedStage]] = []
        self._arrivals = Arrivals(device, self._codec, disk, self._readers, self._fillers)

    def size(self, tokens: int) -> int:
        return self._codec.size(tokens)

    @property
    def backlog(self) -> int:
        with self._change:
            return self._backlog

    def save(self, jobs: Sequence[Save]) -> None:
        self._check_open()
        begun = [self._begin(job, [self.host.begin(job.entry)]) for job in jobs]
        try:
            pages = np.unique(np.asarray([page for job in jobs for page in job.run.pages], np.int32))
            excerpts = host.download(self._device.extract(pages))
        except Exception as error:  # the pool is lost, or there is no memory for the copies
            for one in begun:
                self._report(one, Done(one.job, _message(error)))
            return
        snapshot = Snapshot(pages, excerpts)
        for job, one in zip(jobs, begun, strict=True):
            self._submit(self._savers, one, partial(self._save, job, one.keeps[0], snapshot))

    def write(self, jobs: Sequence[Write]) -> None:
        self._check_open()
        for job in jobs:
            begun = self._begin(job, [self._entry(job.copy)])
            with self._change:
                self._backlog += self.size(job.copy.length)
            self._when_ready(self._writers, begun, partial(self._write, job, begun.keeps[0]))

    def load(self, jobs: Sequence[Load]) -> None:
        self._check_open()
        for job in jobs:
            kept = {piece: self._entry(piece) for piece in set(job.pieces) if not isinstance(piece.entry, bytes)}
            begun = self._begin(job, list(kept.values()))
            self._loading[job.number] = begun
            self._when_ready(self._loaders, begun, partial(self._load, begun, kept))

    def give_up(self, number: int) -> None:
        begun = self._loading.pop(number)
        begun.given_up = True
        self._take_back(begun)

    def clear(self, pages: Sequence[int]) -> None:
        """Put zeros into pages, none twice; nothing happens if the pool is lost, which is made anew."""
        try:
            self._device.clear(np.asarray(pages, np.int32))
        except Exception:
            _log.warning("pages could not be cleared", exc_info=True)

    def forget(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self.host.forget(entry)

    def poll(self) -> Sequence[Done]:
        with self._change:
            ready, self._ready = self._ready, []
        done = []
        for begun, what in ready:
            if isinstance(what, _LoadedStage):
                self._insert(begun, what)
            elif not begun.given_up:
                done.append(self._settle(begun, what))
        return done

    def arrived(self) -> Mapping[int, int]:
        return {number: begun.stages for number, begun in self._loading.items() if begun.error is None}

    def flush(self) -> None:
        """Wait until workers have finished what was begun: saves are in host memory then, writes on disk."""
        with self._change:
            self._change.wait_for(lambda: self._closed or not self._outstanding)

    def close(self, wait: bool = True) -> None:
        """Begin nothing more. wait: first finish what was begun; otherwise only what a worker is at."""
        if wait:
            self.flush()
        with self._change:
            self._closed = True
            self._change.notify_all()
        for threads in (self._loaders, self._readers, self._fillers, self._savers, self._writers):
            threads.shutdown(wait=wait, cancel_futures=True)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transfer engine is closed")

    def _entry(self, piece: Copy) -> HostEntry:
        assert isinstance(piece.entry, int)
        return self.host.use(piece.entry)

    def _begin(self, job: Job, keeps: Sequence[HostEntry]) -> _Begun:
        with self._change:
            self._outstanding += 1
        return _Begun(job, keeps)

    def _insert(self, begun: _Begun, stage: _LoadedStage) -> None:
        assert isinstance(begun.job, Load)
        if begun.given_up or begun.error is not None:
            return
        try:
            self._device.insert(np.asarray(begun.job.run.pages, np.int32), stage.excerpts, stage.number)
            begun.stages += 1
        except Exception as error:  # the pool is lost
            begun.error = _message(error)

    def _take_back(self, begun: _Begun) -> None:
        """Leave nothing of a load that was not checked in pages that others will have."""
        assert isinstance(begun.job, Load)
        if begun.stages and any(isinstance(piece.entry, bytes) for piece in begun.job.pieces):
            self.clear(begun.job.run.pages)

    def _settle(self, begun: _Begun, done: Done) -> Done:
        if isinstance(begun.job, Load):
            del self._loading[begun.job.number]
            if begun.error is not None:
                done = Done(begun.job, begun.error)
            if done.error is not None:
                self._take_back(begun)
        return replace(done, seconds=time.monotonic() - begun.start)

    def _when_ready(self, threads: ThreadPoolExecutor, begun: _Begun, work: Callable[[], Done]) -> None:
        missing = len(begun.keeps)

        def arrived(_: Future[None]) -> None:
            nonlocal missing
            with self._change:
                missing -= 1
                last = not missing
            if last:
                self._submit(threads, begun, work)

        if not begun.keeps:
            self._submit(threads, begun, work)
        for entry in begun.keeps:
            entry.ready.add_done_callback(arrived)

    def _submit(self, threads: ThreadPoolExecutor, begun: _Begun, work: Callable[[], Done]) -> None:
        with self._change:
            if not self._closed:  # an executor that shuts down takes nothing
                threads.submit(self._finish, begun, work)

    def _finish(self, begun: _Begun, work: Callable[[], Done]) -> None:
        try:
            done = work()
        except Exception as error:
            done = Done(begun.job, _message(error))
        self._report(begun, done)

    def _report(self, begun: _Begun, done: Done) -> None:
        if isinstance(begun.job, Save):
            begun.keeps[0].error = done.error
        with self._change:
            self._ready.append((begun, done))
        if isinstance(begun.job, Save):
            begun.keeps[0].ready.set_result(None)  # only now: a save is reported before the jobs that waited for it
        for entry in begun.keeps:
            self.host.release(entry)
        self.notify()
        with self._change:
            self._outstanding -= 1
            if isinstance(begun.job, Write):
                self._backlog -= self.size(begun.job.copy.length)
            self._change.notify_all()

    def _save(self, job: Save, entry: HostEntry, snapshot: Snapshot) -> Done:
        entry.arrays, loss = self._codec.encode(*snapshot.read(job.run, self._codec, self._device.page_size))
        return Done(job, bytes=sum(x.nbytes for x in entry.arrays.values()), loss=loss)

    def _write(self, job: Write, entry: HostEntry) -> Done:
        assert self._disk is not None
        part = cut(entry.read(), job.copy.begin, job.copy.begin + job.copy.length)
        return Done(job, bytes=self._disk.write(job.record, part))

    def _load(self, begun: _Begun, kept: Mapping[Copy, HostEntry]) -> Done:
        assert isinstance(begun.job, Load)
        moved = 0
        for stage, excerpts in enumerate(self._arrivals.of(begun.job, kept)):
            moved += nbytes(excerpts)
            with self._change:
                self._ready.append((begun, _LoadedStage(stage, excerpts)))
            self.notify()
        return Done(begun.job, bytes=moved)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
