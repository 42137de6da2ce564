"""SQLite files that one process holds alone, checksums of what is stored, and a fair lock for writers."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from ragjax.core import ConfigError, DiskFullError

T = TypeVar("T")


class HeldError(ConfigError):
    """Another process has the file open."""


def exclusive(place: Path | None, prepare: Callable[[sqlite3.Connection], None], remedy: str) -> sqlite3.Connection:
    """An open database, prepared, or ConfigError; its folder is made if need be. None: in memory.

    prepare: makes tables and checks what is there. remedy: what to do about a broken file.
    """
    try:
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(place or ":memory:", timeout=1.0, check_same_thread=False)
        # damaged text can be read, and then is not what it should be; `sqlite3` would raise while rows are fetched
        database.text_factory = lambda stored: stored.decode("utf-8", "replace")
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: cannot be opened: {error}") from error
    try:
        database.execute("pragma locking_mode = exclusive")
        database.execute("pragma secure_delete = on")  # what is deleted is overwritten,
        database.execute("pragma journal_size_limit = 0")  # and the journal, which has a copy of it, cut to nothing
        if database.execute("pragma integrity_check(1)").fetchall() != [("ok",)]:  # finds wrong indexes too
            raise sqlite3.DatabaseError("its pages do not fit together")
        prepare(database)
    except sqlite3.OperationalError as error:
        database.close()
        if "locked" in str(error):
            raise HeldError(f"{place}: cannot be used: {error}; another process has it open") from error
        raise ConfigError(f"{place}: cannot be used: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter from messages that quote the file
        database.close()
        raise ConfigError(f"{place}: broken ({error}); {remedy}") from error
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit what is done within it; roll back if there is an error. Raises DiskFullError or ConfigError."""
    try:
        with database:
            yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
            reason = "the server's disk is full: delete files or vector stores, or make room on it"
            raise DiskFullError(reason) from error
        _, _, place = database.execute("pragma database_list").fetchone()
        raise ConfigError(f"{place}: cannot be written: {error}") from error


def free(database: sqlite3.Connection, delete: Callable[[], T], spare: Path | None = None) -> T:
    """Return what `delete` returns; on a full disk it is called again with what room there is.

    SQLite keeps a copy of all that it overwrites until a transaction ends. What is deleted is not overwritten then, but
    by what comes later. spare: a file that holds room for the rest (`hold_spare`).
    """
    try:
        return delete()
    except DiskFullError:
        if spare is not None:
            spare.unlink(missing_ok=True)
        database.execute("pragma secure_delete = off")
        try:
            return delete()
        finally:
            database.execute("pragma secure_delete = on")


SPARE = 2**20
"""Bytes of a spare file."""


def hold_spare(spare: Path | None) -> None:
    if spare is None or spare.exists():
        return
    try:
        spare.write_bytes(bytes(SPARE))
    except OSError:
        spare.unlink(missing_ok=True)


def compare_schema(database: sqlite3.Connection, schema: str) -> None:
    """Raise sqlite3.DatabaseError unless the tables have the columns of a schema."""
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(schema)
        tables = [name for (name,) in fresh.execute("select name from sqlite_master where type = 'table'")]
        if any(_columns(database, table) != _columns(fresh, table) for table in tables):
            raise sqlite3.DatabaseError("its tables are others")


def _columns(database: sqlite3.Connection, table: str) -> set[tuple[str, str, int]]:
    return {(name, kind, needed) for _, name, kind, needed, *_ in database.execute(f"pragma table_info({table})")}


def checksum(parts: Iterable[object]) -> bytes:
    """16 bytes that tell values, in this order, from others: bytes as they are, all else as its text."""
    digest = hashlib.blake2b(digest_size=16)
    for value in parts:
        part = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class FairLock:
    """A lock that no thread takes again while another one waits for it; `threading.Lock` mostly goes to the former."""

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by the one that is next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
