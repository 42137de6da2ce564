"""Brings the index of a folder into agreement with its files: when it is opened, and for `verify`.

A crash leaves at most a file without a row, a row without a file, and drafts. The files are the truth: a file without a
row is adopted by what its header says, a row without a file goes, and an index that is damaged is built from the files.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragjax.store import entry
from ragjax.store.entry import Damaged
from ragjax.store.folder import Folder, Manifest, is_draft, reason, remove_draft
from ragjax.store.index import Index

_log = logging.getLogger(__name__)

_REMEMBERED = 10_000  # flaws kept for `verify`


@dataclass(frozen=True, slots=True)
class Flaw:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Entries of the store now, and operations of this process since it opened the store.

    foreign: folders of this model that were passed over. missing: reads of entries that were gone. set_aside: files
    found damaged or foreign. evicted: entries that made room. failed: questions that the index could not answer.
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
    failed: int = 0


class Journal:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._flaws: deque[Flaw] = deque(maxlen=_REMEMBERED)
        self._touched: dict[bytes, int] = {}
        self._now = 0

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def counts(self) -> Mapping[str, int]:
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
        self._folder.set_aside(path, self.tick())

    def flaws(self) -> tuple[Flaw, ...]:
        with self._lock:
            return tuple(self._flaws)

    def tick(self) -> int:
        """A time later than all before, ns; also than those in the index: the clock may have been set back."""
        with self._lock:
            self._now = max(self._now + 1, time.time_ns())
            return self._now

    def begin_after(self, when: int) -> None:
        with self._lock:
            self._now = max(self._now, when)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            when = self.tick()
            with self._lock:
                self._touched[key] = when

    @property
    def touched(self) -> int:
        return len(self._touched)

    def take_touched(self) -> Mapping[bytes, int]:
        with self._lock:
            touched, self._touched = self._touched, {}
        return touched


SLICE = 64
"""Entries that are looked up or adopted in one transaction."""


class Repair:
    """Opens the index of a folder, and repairs it."""

    def __init__(self, folder: Folder, manifest: Manifest, journal: Journal):
        self._folder = folder
        self._manifest = manifest
        self._journal = journal

    def open(self) -> Index:
        """The index in agreement with the files. Raises OSError, sqlite3.Error or Damaged."""
        if Manifest.read(self._folder.path) is None:
            self._manifest.write(self._folder.path)
        with self._folder.lock():
            try:
                return self._opened()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                self._journal.blame(self._folder.index, f"it is rebuilt: {error}")
                self._journal.set_aside(self._folder.index)
                return self._opened()  # SQLite drops the write-ahead log of a database that is gone

    def reconcile(self, index: Index) -> None:
        """Adopt files without a row, drop rows without a file, remove what dead writers left."""
        # Rows first: what is written from here on is then merely adopted twice, and what goes is looked for again.
        rows = set(index.all_keys())
        orphans = []
        for path in self._folder.files():
            key = self._folder.key(path)
            if key is None:
                if is_draft(path):
                    remove_draft(path)
                else:
                    self._journal.blame(path, "it is no entry, or not where it belongs")
                    self._journal.set_aside(path)
            elif key in rows:
                rows.discard(key)
            else:
                orphans.append(path)
        for begin in range(0, len(orphans), SLICE):
            with index.change():
                for path in orphans[begin : begin + SLICE]:
                    self._adopt(index, path)
        with index.change():
            self.drop_if_gone(index, rows)

    def drop_if_gone(self, index: Index, keys: Iterable[bytes]) -> None:
        for key in keys:
            if not self._folder.entry(key).exists():
                index.drop(key)

    def _opened(self) -> Index:
        index = Index(self._folder.index)
        try:
            self.reconcile(index)
            self._journal.begin_after(index.latest())
        except BaseException:
            index.close()
            raise
        return index

    def _adopt(self, index: Index, path: Path) -> None:
        try:
            status = path.stat()
            record = entry.peek(path, self._manifest.identity)
            if self._folder.entry(record.key) != path:
                raise Damaged("it is another entry's content")
            index.add(record, status.st_size, status.st_mtime_ns)
        except Damaged as error:
            self._journal.blame(path, str(error))
            self._journal.set_aside(path)
        except OSError as error:
            # It went meanwhile, or cannot be read now and is tried again when the index is next opened.
            _log.info("%s is not adopted: %s", path, reason(error))
