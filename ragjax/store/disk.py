"""The disk tier: KV that outlives the process, shared by every process that serves the same model from a directory.

    DIRECTORY/<identity, hex>/      one model's; a folder that another version made is left alone
        manifest.json               format, identity, and what the model is for people to read
        index.sqlite                what there is (`ragjax.store.index`); rebuilt from the entries if need be
        entries/ab/<key>.safetensors
        aside/                      what was found damaged or foreign: never read, first to go when room is needed
        lock                        held while the index is opened or repaired

An entry is written under another name, synced, renamed and put into the index, so that a crash at any moment leaves
whole entries and at most a file without a row or a row without a file; opening the store repairs
both. Every read checks every bit. No text is kept, only token ids and digests; but who may read the files may read the
knowledge.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.core.tiers import Record
from ragjax.store import entry
from ragjax.store.entry import Arrays, Bytes, Damaged, DiskError, open_regular
from ragjax.store.folder import Folder, Manifest, claim, draft, reason, stamp
from ragjax.store.index import Index
from ragjax.store.repair import SLICE, Flaw, Journal, Repair, Stats

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 256  # touches at which a read passes them on to the index; a write passes on any


class Missing(DiskError):
    """There is no such entry (any more)."""


class WriteError(DiskError):
    """The store could not be changed: the disk is full or read-only, or the entry exceeds the limit."""


@contextmanager
def _failing(kind: type[DiskError], what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise kind(f"{what}: {reason(error)}") from error


class DiskStore:
    """The entries of one model in a directory: a `DiskIndex`, and their bytes.

    Any thread may call anything. `find`, `children`, `chunks` and `touch` use the index alone and wait for no writer.
    """

    def __init__(self, folder: Path, manifest: Manifest, max_bytes: int, foreign: int = 0):
        self.folder = folder
        self.about: Mapping[str, str] = manifest.about
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._foreign = foreign
        self._files = Folder(folder)
        self._journal = Journal(self._files)
        self._repair = Repair(self._files, manifest, self._journal)
        self._repairing = threading.Lock()
        self._retired: list[Index] = []
        self._index = self._repair.open()
        try:
            with self._index.change() as index:
                self._make_room(index, max_bytes)
        except (OSError, sqlite3.Error) as error:
            _log.warning("%s: no room can be made: %s", folder, reason(error))

    @classmethod
    def open(cls, directory: str | Path, identity: bytes, *, about: Mapping[str, str], max_bytes: int) -> DiskStore:
        """Open the entries of a model in a directory, which is made if need be; others and other processes may use it.

        identity: digest of all that makes two models' KV differ, at most 64 bytes. about: put in a new manifest for
        people to read. max_bytes: bound on the model's files; the entries accessed longest ago leave first.
        """
        if not 1 <= len(identity) <= 64:
            raise ConfigError(f"identity must be of 1 to 64 bytes, not {len(identity)}")
        if max_bytes < 1:
            raise ConfigError(f"max_bytes must be at least 1, not {max_bytes}")
        manifest = Manifest(identity, about)
        try:
            folder, foreign = claim(Path(directory), manifest)
            return cls(folder, manifest, max_bytes, foreign)
        except (OSError, sqlite3.Error, Damaged) as error:
            raise ConfigError(f"{directory} cannot be used as a disk cache: {reason(error)}") from error

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, key: bytes) -> Record | None:
        found = self._asked(lambda index: index.find(key), None)
        return None if found is None else found[0]

    def children(self, place: bytes, tokens: bytes) -> Sequence[Record]:
        return self._asked(lambda index: index.children(place, tokens), ())

    def chunks(self, place: bytes) -> Sequence[Record]:
        return self._asked(lambda index: index.chunks(place), ())

    def touch(self, keys: Sequence[bytes]) -> None:
        self._journal.touch(keys)

    def write(self, record: Record, arrays: Arrays) -> int:
        """Keep an entry, if it is not kept already; returns its file's bytes. Others leave where room is needed."""
        with _failing(WriteError, f"{self.folder}: an entry cannot be written"):
            self._refresh()
            if size := self._kept(record):
                return size
            pieces = entry.encode(record, arrays, self._manifest.identity)
            size = sum(piece.nbytes for piece in pieces)
            self._put(record, pieces, size)
        self._journal.count(writes=1, written_bytes=size)
        return size

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        """The arrays of an entry, in equal shares of their first axis, the layers, as they were written.

        Every bit is checked, but none before the last share comes: an error after some says that they are not to be
        used. expected: what it was when it was chosen.

        Raises:
            Missing: there is no such entry (any more), or it has become another than expected.
            Damaged: it is not what was written, and was set aside.
            DiskError: it cannot be read now.
        """
        with _failing(DiskError, f"{self._name(key)} cannot be read"):
            self._refresh()
            if self._journal.touched >= _BATCH:
                self._flush()
            size = yield from self._fetch(key, count, expected)
        self._journal.count(reads=1, read_bytes=size)

    def forget(self, key: bytes) -> None:
        with _failing(WriteError, f"{self._name(key)} cannot be removed"), self._index.change() as index:
            self._remove(index, key)

    def stats(self) -> Stats:
        entries, size = self._asked(lambda index: index.total(), (0, 0))
        aside = self._files.aside()
        aside_bytes = sum(n for _, n in aside)
        return Stats(entries, size, self._max_bytes, len(aside), aside_bytes, self._foreign, **self._journal.counts())

    def ages(self) -> list[tuple[int, int]]:
        """(time of the last access in ns, bytes of the file) of every entry, longest ago first."""
        self._flush()
        return self._index.ages()

    def verify(self) -> tuple[Flaw, ...]:
        """Read every entry, and set aside what is damaged; returns the flaws since the store was opened."""
        with _failing(DiskError, f"{self.folder} cannot be verified"):
            self._refresh()
            with self._files.lock():
                self._repair.reconcile(self._index)
            for key in self._index.all_keys():
                with suppress(Missing, Damaged):
                    list(self._fetch(key, 1))
        return self._journal.flaws()

    def gc(self, max_bytes: int) -> int:
        """Empty `aside`, and remove entries until at most `max_bytes` are left; returns the bytes removed."""
        before = self.stats()
        removing = _failing(WriteError, f"{self.folder}: entries cannot be removed")
        with removing, self._index.change() as index:
            for path, _ in self._files.aside():
                path.unlink(missing_ok=True)
            self._make_room(index, max_bytes)
        after = self.stats()
        return before.bytes + before.aside_bytes - after.bytes - after.aside_bytes

    def close(self) -> None:
        self._flush()
        for index in (*self._retired, self._index):
            index.close()

    def _fetch(
        self, key: bytes, count: int, expected: Record | None = None
    ) -> Generator[dict[str, NDArray[Any]], None, int]:
        found = self._index.find(key)
        if found is None:
            raise self._gone(key)
        with self._condemning(key) as path, open_regular(path) as file:
            reader = entry.Reader(file, self._manifest.identity)
            if reader.record.key != key:
                raise Damaged("it is another entry's content")
            if found == (reader.record, reader.size) and expected in (None, reader.record):
                yield from reader.shares(count)
            else:  # what it says of itself counts only if it is intact
                list(reader.shares(1))
        if found != (reader.record, reader.size):  # an intact file is right, and the index is wrong
            with suppress(sqlite3.Error), self._index.change() as index:
                index.drop(key)
                index.add(reader.record, reader.size, self._journal.tick())
            raise self._journal.blame(self._files.entry(key), "the index says otherwise of it")
        if expected not in (None, reader.record):
            raise Missing(f"{self._name(key)}: another process has replaced it since it was looked up")
        return reader.size

    @contextmanager
    def _condemning(self, key: bytes) -> Iterator[Path]:
        """The entry's file, to be read within; it is set aside if that shows that it is damaged."""
        path = self._files.entry(key)
        seen = stamp(path)
        try:
            yield path
        except FileNotFoundError:
            with self._index.change() as index:
                self._repair.drop_if_gone(index, [key])
            raise self._gone(key) from None
        except Damaged as error:
            raise self._condemn(key, seen, str(error)) from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise self._condemn(key, seen, "the disk cannot read it") from error

    def _gone(self, key: bytes) -> Missing:
        self._journal.count(missing=1)
        return Missing(f"{self._name(key)}: there is no such entry")

    def _condemn(self, key: bytes, seen: tuple[int, int] | None, why: str) -> Damaged:
        """Move a file aside and drop its row, unless a new file took its place in the meantime."""
        path = self._files.entry(key)
        with suppress(OSError, sqlite3.Error), self._index.change() as index:
            if stamp(path) == seen:
                index.drop(key)
                self._journal.set_aside(path)
        return self._journal.blame(path, why)

    def _kept(self, record: Record) -> int:
        """The file's bytes if this very entry is kept already, which then counts as an access; else 0."""
        found = self._index.find(record.key)
        if found is None or found[0] != record:
            return 0
        with suppress(FileNotFoundError):
            if self._files.entry(record.key).stat().st_size == found[1]:
                self.touch([record.key])
                return found[1]
        return 0

    def _put(self, record: Record, pieces: Sequence[Bytes], size: int) -> None:
        if size > self._max_bytes:
            raise OSError(f"it takes {size} bytes, and the limit is {self._max_bytes}")
        # Room is made before, for the disk's sake, and again when the entry joins the index, since others write too.
        with self._index.change() as index:
            self._make_room(index, self._max_bytes - size)
        path = self._files.entry(record.key)
        with draft(path, (piece.data for piece in pieces)) as file:
            renamed = False
            try:
                with self._index.change() as index:
                    index.drop(record.key)
                    file.replace(path)
                    renamed = True
                    self._make_room(index, self._max_bytes - size)
                    index.add(record, size, self._journal.tick())
            except BaseException:
                if renamed:
                    path.unlink(missing_ok=True)
                raise

    def _make_room(self, index: Index, limit: int) -> None:
        """Within a change: what was set aside goes, then what was accessed longest ago, until `limit` bytes remain."""
        self._pass_on_touched(index)
        aside = self._files.aside()
        excess = index.total()[1] + sum(size for _, size in aside) - limit
        for path, size in aside:
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size
        while excess > 0 and (oldest := index.oldest(SLICE)):
            for key, size in oldest:
                if excess <= 0:
                    return
                self._remove(index, key)
                self._journal.count(evicted=1)
                excess -= size

    def _remove(self, index: Index, key: bytes) -> None:
        """Within a change: no other process can write the entry between the two."""
        index.drop(key)
        self._files.entry(key).unlink(missing_ok=True)

    def _flush(self) -> None:
        def pass_on(index: Index) -> None:
            with index.change():
                self._pass_on_touched(index)

        self._asked(pass_on, None)

    def _pass_on_touched(self, index: Index) -> None:
        """Within a change. If the change fails, the order of some accesses is lost, and nothing more."""
        index.touch(self._journal.take_touched().items())

    def _name(self, key: bytes) -> str:
        return self._files.name(self._files.entry(key))

    def _asked(self, ask: Callable[[Index], T], otherwise: T) -> T:
        index = self._index
        try:
            return ask(index)
        except sqlite3.Error as error:
            self._journal.count(failed=1)
            _log.warning("%s: the index does not answer: %s", self.folder, error)
            if not isinstance(error, sqlite3.OperationalError | sqlite3.ProgrammingError):
                index.suspect = True
            return otherwise

    def _refresh(self) -> None:
        """Open the index again if it was removed or replaced, or proved damaged."""
        with self._repairing:
            if not self._index.is_current():
                self._retired.append(self._index)  # other threads may still be using it
                self._index = self._repair.open()
