"""What one process notes of a disk store while it is open: counters, flaws, and accesses on their way to the index."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragjax.store.entry import Damaged
from ragjax.store.folder import Folder

_log = logging.getLogger(__name__)

_REMEMBERED = 10_000  # flaws kept for `verify`


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that is not as it was written. name: the file, relative to the store's folder."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """What the store holds now, and what this process did since it opened it.

    entries, bytes: finished entries, and their files. aside_files, aside_bytes: what lies in `aside`.
    foreign: folders of this model that were passed over. reads, read_bytes, writes, written_bytes: those that
    succeeded, and their files. missing: reads of entries that were gone. set_aside: files found damaged or foreign.
    evicted, evicted_bytes: entries that made room. failed: questions that the index could not answer.
    """

    entries: int
    bytes: int
    max_bytes: int
    aside_files: int
    aside_bytes: int
    foreign: int
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    missing: int = 0
    set_aside: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    failed: int = 0


class Journal:
    """Any thread may call anything; nobody who holds the lock waits."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._flaws: deque[Flaw] = deque(maxlen=_REMEMBERED)
        self._touched: dict[bytes, int] = {}
        self._now = 0

    def count(self, **more: int) -> None:
        """Add to counters."""
        with self._lock:
            self._counts.update(more)

    def counts(self) -> Mapping[str, int]:
        """The counters, by name."""
        with self._lock:
            return dict(self._counts)

    def blame(self, path: Path, why: str) -> Damaged:
        """Note a flaw of a file of the folder; returns the error to raise."""
        _log.warning("%s is not used: %s", path, why)
        flaw = Flaw(self._folder.name(path), why)
        with self._lock:
            self._flaws.append(flaw)
            self._counts["set_aside"] += 1
        return Damaged(f"{flaw.name}: {why}")

    def set_aside(self, path: Path) -> None:
        """Move a file of the folder aside; where the folder cannot be written it stays."""
        self._folder.set_aside(path, self.tick())

    def flaws(self) -> tuple[Flaw, ...]:
        """The flaws found so far, oldest first."""
        with self._lock:
            return tuple(self._flaws)

    def tick(self) -> int:
        """A time later than all before, ns."""
        with self._lock:
            return self._tick()

    def _tick(self) -> int:
        self._now = max(self._now + 1, time.time_ns())
        return self._now

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note an access to each entry, in this order."""
        with self._lock:
            for key in keys:
                self._touched[key] = self._tick()

    @property
    def touched(self) -> int:
        """Number of entries whose access the index has not been told yet."""
        return len(self._touched)

    def take_touched(self) -> Mapping[bytes, int]:
        """The time of the last access by key, ns; they are forgotten here."""
        with self._lock:
            touched, self._touched = self._touched, {}
        return touched
