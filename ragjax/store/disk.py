"""The disk tier: KV that outlives the process, shared by every process that serves the same model from a directory.

    DIRECTORY/<identity, hex>/      one model's; a folder that another version made is left alone
        manifest.json               format, identity, and what the model is for people to read
        index.sqlite                what there is (`ragjax.store.index`); built anew from the entries if need be
        entries/ab/<key>.safetensors
        aside/                      what was found damaged or foreign: never read, first to go when room is needed
        lock                        held while the index is opened or mended

An entry is written under another name, synced, renamed and put into the index, so that a crash at any moment leaves
whole entries and at most a file without a row or a row without a file; opening the store mends both. Every read checks
every bit. No text is kept, only token ids and digests; but who may read the files may read the knowledge.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import sqlite3
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.core.tiers import Record
from ragjax.store import entry
from ragjax.store.draft import draft, is_draft, remove_draft
from ragjax.store.entry import Arrays, Bytes, Damaged, DiskError
from ragjax.store.index import Index
from ragjax.store.manifest import Manifest, claim

_log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_BATCH = 256  # touches at which a read passes them on to the index; a write passes on any
_SLICE = 64  # entries looked up or adopted in one go
_REMEMBERED = 10_000  # flaws kept for `verify`


class Missing(DiskError):
    """There is no such entry (any more)."""


class WriteError(DiskError):
    """The store could not be changed: the disk is full or read-only, or the entry exceeds the limit."""


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
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    missing: int
    set_aside: int
    evicted: int
    evicted_bytes: int
    failed: int


_COUNTED = (
    *("reads", "read_bytes", "writes", "written_bytes"),
    *("missing", "set_aside", "evicted", "evicted_bytes", "failed"),
)


class DiskStore:
    """The entries of one model in a directory: a `DiskIndex`, and their bytes.

    Any thread may call anything. `find`, `children`, `chunks` and `touch` use the index alone and wait for no writer. A
    folder that cannot be written is read from all the same, and `write` says why it fails.
    """

    def __init__(self, folder: Path, manifest: Manifest, max_bytes: int, foreign: int = 0):
        """Open a folder by its manifest, after `foreign` others were passed over; see `open`."""
        self.folder = folder
        self.about: Mapping[str, str] = manifest.about
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._foreign = foreign
        self._lock = threading.Lock()  # guards the four below; nobody who holds it waits
        self._counts: Counter[str] = Counter()
        self._flaws: deque[Flaw] = deque(maxlen=_REMEMBERED)
        self._touched: dict[bytes, int] = {}
        self._now = 0
        self._mending = threading.Lock()
        self._retired: list[Index] = []
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self._refusal = ""  # why nothing can be written, if so
        self._index = self._open_index()
        self._shrink()

    @classmethod
    def open(cls, directory: str | Path, identity: bytes, *, about: Mapping[str, str], max_bytes: int) -> DiskStore:
        """Open the entries of the model `identity` in a directory, which is made if need be.

        Args:
            directory: may be shared with other models and other processes.
            identity: digest of all that makes two models' KV differ, at most 64 bytes.
            about: put in a new manifest for people to read.
            max_bytes: bound on the model's files; the entries accessed longest ago leave first.

        Raises:
            ConfigError: the directory cannot be made or read, or an argument cannot work.
        """
        if not 1 <= len(identity) <= 64:
            raise ConfigError(f"identity must be of 1 to 64 bytes, not {len(identity)}")
        if max_bytes < 1:
            raise ConfigError(f"max_bytes must be at least 1, not {max_bytes}")
        manifest = Manifest(identity, about)
        try:
            folder, foreign = claim(Path(directory), manifest)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be used as a disk cache: {_reason(error)}") from error
        return cls(folder, manifest, max_bytes, foreign)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ the shelf

    def find(self, key: bytes) -> Record | None:
        """The entry with this key."""
        index = self._index
        try:
            found = index.find(key)
        except sqlite3.Error as error:
            self._distrust(index, error)
            return None
        return None if found is None else found[0]

    def children(self, place: bytes, first: int) -> Sequence[Record]:
        """Causal and dependency entries whose context is `place` and whose first token is `first`."""
        index = self._index
        try:
            return index.children(place, first)
        except sqlite3.Error as error:
            self._distrust(index, error)
            return ()

    def chunks(self, place: bytes) -> Sequence[Record]:
        """Approximate entries whose place is `place`, oldest first."""
        index = self._index
        try:
            return index.chunks(place)
        except sqlite3.Error as error:
            self._distrust(index, error)
            return ()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note an access, of ancestors last: what was touched longest ago leaves first."""
        with self._lock:
            for key in keys:
                self._touched[key] = self._tick()

    # ------------------------------------------------------------------------------------ the bytes

    def write(self, record: Record, arrays: Arrays) -> int:
        """Keep an entry, if it is not kept already; returns its file's bytes. Others leave where room is needed.

        Args:
            record: what the arrays are; its digests are 32 bytes.
            arrays: KV of the record's tokens by name, each of a dtype in `entry.DTYPES`.

        Raises:
            WriteError: nothing was written.
            ValueError: the format cannot hold the record or an array.
        """
        try:
            self._refresh()
            if size := self._kept(record):
                return size
            pieces = entry.encode(record, arrays, self._manifest.identity)
            size = sum(piece.nbytes for piece in pieces)
            self._put(record, pieces, size)
        except (OSError, sqlite3.Error) as error:
            raise WriteError(f"{self.folder}: an entry cannot be written: {_reason(error)}") from error
        self._count(writes=1, written_bytes=size)
        return size

    def read(self, key: bytes, expected: Record | None = None) -> dict[str, NDArray[Any]]:
        """The arrays of an entry as they were written; every bit was checked.

        expected: what it was when it was chosen (None: whatever it is).

        Raises:
            Missing: there is no such entry (any more), or it has become another than expected.
            Damaged: it is not what was written, and was set aside.
            DiskError: it cannot be read now.
        """
        try:
            self._refresh()
            if len(self._touched) >= _BATCH:
                self._flush()
            arrays, size = self._fetch(key, expected)
        except (OSError, sqlite3.Error) as error:
            raise DiskError(f"{self._name(key)} cannot be read: {_reason(error)}") from error
        self._count(reads=1, read_bytes=size)
        return arrays

    def forget(self, key: bytes) -> None:
        """Remove an entry, if there is one.

        Raises:
            WriteError: it could not be removed.
        """
        try:
            with self._index.change() as index:
                self._remove(index, key)
        except (OSError, sqlite3.Error) as error:
            raise WriteError(f"{self._name(key)} cannot be removed: {_reason(error)}") from error

    # ------------------------------------------------------------------------------------ upkeep

    def stats(self) -> Stats:
        """What the store holds and did."""
        index, entries, size = self._index, 0, 0
        try:
            entries, size = index.total()
        except sqlite3.Error as error:
            self._distrust(index, error)
        aside = self._aside()
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
        return Stats(entries, size, self._max_bytes, len(aside), sum(n for _, n in aside), self._foreign, **counts)

    def ages(self) -> list[tuple[int, int]]:
        """(time of the last access in ns, bytes of the file) of every entry, longest ago first."""
        self._flush()
        return self._index.ages()

    def verify(self) -> tuple[Flaw, ...]:
        """Read every entry, and set aside what is damaged; returns the flaws found now or since the store was opened.

        Raises:
            DiskError: it cannot be done now.
        """
        try:
            self._refresh()
            if not self._refusal:
                with self._alone():
                    self._reconcile(self._index)
            for key in self._index.all_keys():
                with suppress(Missing, Damaged):
                    self._fetch(key)
        except (OSError, sqlite3.Error) as error:
            raise DiskError(f"{self.folder} cannot be verified: {_reason(error)}") from error
        with self._lock:
            return tuple(self._flaws)

    def gc(self, max_bytes: int) -> int:
        """Empty `aside`, and remove entries until at most `max_bytes` are left; returns the bytes removed.

        Raises:
            WriteError: they could not be removed.
        """
        before = self.stats()
        try:
            with self._index.change() as index:
                for path, _ in self._aside():
                    path.unlink(missing_ok=True)
                self._make_room(index, max_bytes)
        except (OSError, sqlite3.Error) as error:
            raise WriteError(f"{self.folder}: entries cannot be removed: {_reason(error)}") from error
        after = self.stats()
        return before.bytes + before.aside_bytes - after.bytes - after.aside_bytes

    def close(self) -> None:
        """Pass on what was touched, and close the index; the store cannot be used any more."""
        self._flush()
        for index in (*self._retired, self._index):
            index.close()
        if self._private is not None:
            self._private.cleanup()

    # ------------------------------------------------------------------------------------ reading

    def _fetch(self, key: bytes, expected: Record | None = None) -> tuple[dict[str, NDArray[Any]], int]:
        found = self._index.find(key)
        if found is None:
            raise self._gone(key)
        path = self._path(key)
        stamp = _stamp(path)
        try:
            data = entry.load(path)
            record, arrays = entry.decode(data, self._manifest.identity)
            if record.key != key:
                raise Damaged("it is another entry's content")
        except FileNotFoundError:
            with self._index.change() as index:
                self._drop_if_gone(index, [key])
            raise self._gone(key) from None
        except Damaged as error:
            raise self._condemn(key, stamp, str(error)) from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise self._condemn(key, stamp, "the disk cannot read it") from error
        if found != (record, len(data)):
            raise self._correct(record, len(data))
        if expected is not None and record != expected:
            raise Missing(f"{self._name(key)}: another process has replaced it since it was looked up")
        return arrays, len(data)

    def _gone(self, key: bytes) -> Missing:
        self._count(missing=1)
        return Missing(f"{self._name(key)}: there is no such entry")

    def _condemn(self, key: bytes, stamp: tuple[int, int] | None, reason: str) -> Damaged:
        """Move a file aside and drop its row, unless a new file took its place in the meantime."""
        path = self._path(key)
        with suppress(OSError, sqlite3.Error), self._index.change() as index:
            if _stamp(path) == stamp:
                index.drop(key)
                self._move_aside(path)
        return self._blame(path, reason)

    def _correct(self, record: Record, size: int) -> Damaged:
        """Put right what the index says of an intact file."""
        with suppress(sqlite3.Error), self._index.change() as index:
            index.drop(record.key)
            index.add(record, size, self._next_tick())
        return self._blame(self._path(record.key), "the index says otherwise of it")

    def _blame(self, path: Path, reason: str) -> Damaged:
        flaw = Flaw(str(path.relative_to(self.folder)), reason)
        _log.warning("%s is not used: %s", path, reason)
        with self._lock:
            self._flaws.append(flaw)
            self._counts["set_aside"] += 1
        return Damaged(f"{flaw.name}: {reason}")

    def _move_aside(self, path: Path) -> None:
        """Where the folder cannot be written the file stays; its row alone goes."""
        aside = self.folder / "aside"
        with suppress(OSError):
            aside.mkdir(exist_ok=True)
            path.replace(aside / f"{path.name}.{self._next_tick()}")

    # ------------------------------------------------------------------------------------ writing

    def _kept(self, record: Record) -> int:
        """The file's bytes if this very entry is kept already, which then counts as an access; else 0."""
        found = self._index.find(record.key)
        if found is None or found[0] != record:
            return 0
        with suppress(FileNotFoundError):
            if self._path(record.key).stat().st_size == found[1]:
                self.touch([record.key])
                return found[1]
        return 0

    def _put(self, record: Record, pieces: Sequence[Bytes], size: int) -> None:
        if self._refusal:
            raise OSError(self._refusal)
        if size > self._max_bytes:
            raise OSError(f"it takes {size} bytes, and the limit is {self._max_bytes}")
        # Room is made before, for the disk's sake, and again when the entry joins the index, since others write too.
        with self._index.change() as index:
            self._make_room(index, self._max_bytes - size)
        path = self._path(record.key)
        with draft(path, (piece.data for piece in pieces)) as file:
            renamed = False
            try:
                with self._index.change() as index:
                    index.drop(record.key)
                    file.replace(path)
                    renamed = True
                    self._make_room(index, self._max_bytes - size)
                    index.add(record, size, self._next_tick())
            except BaseException:
                if renamed:
                    path.unlink(missing_ok=True)
                raise

    def _make_room(self, index: Index, limit: int) -> None:
        """Within a change: what was set aside goes, then what was accessed longest ago, until `limit` bytes remain."""
        self._pass_on_touched(index)
        aside = self._aside()
        excess = index.total()[1] + sum(size for _, size in aside) - limit
        for path, size in aside:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size
        while excess > 0 and (oldest := index.oldest(_SLICE)):
            for key, size in oldest:
                if excess <= 0:
                    return
                self._remove(index, key)
                self._count(evicted=1, evicted_bytes=size)
                excess -= size

    def _remove(self, index: Index, key: bytes) -> None:
        """Within a change, lest another process writes the entry anew between the two."""
        index.drop(key)
        self._path(key).unlink(missing_ok=True)

    def _shrink(self) -> None:
        try:
            with self._index.change() as index:
                self._make_room(index, self._max_bytes)
        except (OSError, sqlite3.Error) as error:
            _log.warning("%s: no room can be made: %s", self.folder, _reason(error))

    def _aside(self) -> list[tuple[Path, int]]:
        """Files that lie aside and their bytes, oldest first."""
        found = []
        for file in _scan(self.folder / "aside"):
            with suppress(FileNotFoundError):
                found.append((Path(file.path), file.stat(follow_symlinks=False).st_size))
        return sorted(found, key=lambda one: one[0].suffix)

    # ------------------------------------------------------------------------------------ accesses, counters, names

    def _tick(self) -> int:
        """A time later than all before, ns; the lock is held."""
        self._now = max(self._now + 1, time.time_ns())
        return self._now

    def _next_tick(self) -> int:
        with self._lock:
            return self._tick()

    def _flush(self) -> None:
        index = self._index
        try:
            with index.change():
                self._pass_on_touched(index)
        except sqlite3.Error as error:
            self._distrust(index, error)

    def _pass_on_touched(self, index: Index) -> None:
        """Within a change. If the change fails, the order of some accesses is lost, and nothing more."""
        with self._lock:
            touched, self._touched = self._touched, {}
        index.touch(touched.items())

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / "entries" / name[:2] / (name + _SUFFIX)

    def _name(self, key: bytes) -> str:
        return str(self._path(key).relative_to(self.folder))

    # ------------------------------------------------------------------------------------ mending the index

    def _distrust(self, index: Index, error: sqlite3.Error) -> None:
        self._count(failed=1)
        _log.warning("%s: the index does not answer: %s", self.folder, error)
        if not isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
            index.suspect = True

    def _refresh(self) -> None:
        """Open the index again if it was removed or replaced, or proved damaged."""
        if self._index.is_current():
            return
        with self._mending:
            if self._index.is_current():
                return
            # Other threads may still be using the old one.
            self._retired.append(self._index)
            self._index = self._open_index()

    def _open_index(self) -> Index:
        """The index in agreement with the files; where the folder cannot be written, one of this process alone."""
        try:
            if Manifest.read(self.folder) is None:
                self._manifest.write(self.folder)
            with self._alone():
                return self._shared_index()
        except (OSError, sqlite3.Error, Damaged) as error:
            self._refusal = f"it can only be read from: {_reason(error)}"
        _log.warning("%s: %s", self.folder, self._refusal)
        self._private = self._private or tempfile.TemporaryDirectory(prefix="ragjax-index-")
        return self._reconciled(Path(self._private.name) / f"{secrets.token_hex(8)}.sqlite")

    def _shared_index(self) -> Index:
        path = self.folder / "index.sqlite"
        try:
            return self._reconciled(path)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            self._blame(path, f"it is built anew: {error}")
        self._move_aside(path)
        # SQLite drops the write-ahead log of a database that is gone.
        return self._reconciled(path)

    def _reconciled(self, path: Path) -> Index:
        index = Index(path)
        try:
            self._reconcile(index)
        except BaseException:
            index.close()
            raise
        return index

    def _reconcile(self, index: Index) -> None:
        """Adopt files without a row, drop rows without a file, remove what dead writers left."""
        # Rows first: what is written from here on is then merely adopted twice, and what goes is looked for again.
        rows = set(index.all_keys())
        orphans = []
        for path in self._files():
            key = _key(path)
            if key is None or path != self._path(key):
                self._clear(path)
            elif key in rows:
                rows.discard(key)
            else:
                orphans.append(path)
        for begin in range(0, len(orphans), _SLICE):
            with index.change():
                for path in orphans[begin : begin + _SLICE]:
                    self._adopt(index, path)
        with index.change():
            self._drop_if_gone(index, rows)

    def _files(self) -> Iterator[Path]:
        """What lies where entries lie, and drafts of the manifest."""
        yield from (path for file in _scan(self.folder) if is_draft(path := Path(file.path)))
        for shard in _scan(self.folder / "entries"):
            files = _scan(Path(shard.path)) if shard.is_dir(follow_symlinks=False) else [shard]
            yield from (Path(file.path) for file in files if not file.is_dir(follow_symlinks=False))

    def _clear(self, path: Path) -> None:
        if is_draft(path):
            remove_draft(path)
            return
        self._blame(path, "it is no entry, or not where it belongs")
        self._move_aside(path)

    def _adopt(self, index: Index, path: Path) -> None:
        """Within a change: enter a file by what its header says."""
        try:
            status = path.stat()
            record = entry.peek(path, self._manifest.identity)
            if self._path(record.key) != path:
                raise Damaged("it is another entry's content")
            index.add(record, status.st_size, status.st_mtime_ns)
        except Damaged as error:
            self._blame(path, str(error))
            self._move_aside(path)
        except OSError as error:
            # It went meanwhile, or cannot be read now and is tried again when the index is next opened.
            _log.info("%s is not adopted: %s", path, _reason(error))

    def _drop_if_gone(self, index: Index, keys: Iterable[bytes]) -> None:
        """Within a change."""
        for key in keys:
            if not self._path(key).exists():
                index.drop(key)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process opens or mends the index meanwhile."""
        with open(self.folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        return list(files)
    return []


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells a file from another that took its place."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _key(path: Path) -> bytes | None:
    with suppress(ValueError):
        return bytes.fromhex(path.stem)
    return None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
