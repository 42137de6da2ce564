"""The index of the disk tier: what lies in a folder of entries, in an SQLite database in write-ahead-log mode.

Readers never wait for a writer, in this process or another. Everything here can be had again from the entries' headers
except the order of accesses, which then begins at the order of writing.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragjax.core.tiers import Record, first_of
from ragjax.store.entry import FORMAT

_PATIENCE = 10.0  # seconds that a writer waits for another

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,
    accessed INTEGER NOT NULL, -- ns, ever rising
    bytes INTEGER NOT NULL,
    first INTEGER NOT NULL, -- the first token
    key BLOB NOT NULL UNIQUE,
    place BLOB NOT NULL,
    provenance TEXT NOT NULL,
    method TEXT NOT NULL,
    local_start INTEGER NOT NULL,
    lossy INTEGER NOT NULL,
    meta BLOB NOT NULL,
    tokens BLOB NOT NULL
);
CREATE INDEX context ON entry (place, first) WHERE provenance IN ('causal', 'dependency');
CREATE INDEX chunk ON entry (place) WHERE provenance = 'approximate';
CREATE INDEX age ON entry (accessed);
CREATE TABLE total (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0, 0);
CREATE TRIGGER came AFTER INSERT ON entry
    BEGIN UPDATE total SET entries = entries + 1, bytes = bytes + new.bytes; END;
CREATE TRIGGER went AFTER DELETE ON entry
    BEGIN UPDATE total SET entries = entries - 1, bytes = bytes - old.bytes; END;
PRAGMA user_version = {FORMAT};
COMMIT;
"""
_NAMES = {"entry", "context", "chunk", "age", "total", "came", "went"}

_SUMS = """
SELECT (SELECT count(*) FROM entry) = entries AND (SELECT ifnull(sum(bytes), 0) FROM entry) = bytes FROM total
"""

_FIELDS = "key, place, tokens, provenance, method, local_start, lossy, meta"
_FIND = f"SELECT {_FIELDS}, bytes FROM entry WHERE key = ?"
_OF_CONTEXT = "SELECT id FROM entry WHERE place = ? AND first = ? AND provenance IN ('causal', 'dependency')"
_CHILDREN = f"""
SELECT {_FIELDS} FROM entry WHERE id = ({_OF_CONTEXT} AND tokens <= ? ORDER BY tokens DESC, id LIMIT 1)
UNION ALL
SELECT {_FIELDS} FROM entry WHERE id = ({_OF_CONTEXT} AND tokens > ? ORDER BY tokens, id LIMIT 1)
"""
_CHUNKS = f"SELECT {_FIELDS} FROM entry WHERE place = ? AND provenance = 'approximate' ORDER BY id"
_ADD = f"INSERT OR IGNORE INTO entry ({_FIELDS}, bytes, accessed, first) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Index:
    """An open index. Every thread has a connection of its own; changes happen within `change`.

    suspect: set once the database proved damaged while in use; it should then be rebuilt.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.suspect = False
        self._own = threading.local()
        self._lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False
        try:
            _prepare(self._connect("rwc"))
            self._file = _file_id(self.path)
        except BaseException:
            self.close()
            raise

    def is_current(self) -> bool:
        """True while its path names the database that was opened, and no damage is known."""
        return not self.suspect and self._file == _file_id(self.path)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def find(self, key: bytes) -> tuple[Record, int] | None:
        rows = self._connection.execute(_FIND, (key,)).fetchall()
        return (_record(rows[0]), rows[0][-1]) if rows else None

    def children(self, place: bytes, tokens: bytes) -> list[Record]:
        """Find the neighbours of `tokens` in the order of bytes (see `DiskIndex`).

        An entry that begins with more of `tokens` would lie between them. SQLite compares, since many entries of a
        context may begin with one token.
        """
        asked = (place, first_of(tokens), tokens)
        return [_record(row) for row in self._connection.execute(_CHILDREN, (*asked, *asked)).fetchall()]

    def chunks(self, place: bytes) -> list[Record]:
        return [_record(row) for row in self._connection.execute(_CHUNKS, (place,)).fetchall()]

    def all_keys(self) -> list[bytes]:
        return [key for (key,) in self._connection.execute("SELECT key FROM entry").fetchall()]

    def total(self) -> tuple[int, int]:
        entries, size = self._connection.execute("SELECT entries, bytes FROM total").fetchone()
        return entries, size

    def ages(self) -> list[tuple[int, int]]:
        return self._connection.execute("SELECT accessed, bytes FROM entry ORDER BY accessed, id").fetchall()

    def latest(self) -> int:
        """Returns the time of the last access to any entry, ns; 0 if there is none."""
        (found,) = self._connection.execute("SELECT ifnull(max(accessed), 0) FROM entry").fetchone()
        return int(found)

    @contextmanager
    def change(self) -> Iterator[Index]:
        """Within it this thread alone, among all processes, changes the index; all is kept or nothing."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield self
            connection.execute("COMMIT")
        except BaseException:
            # A failed commit may have ended the transaction already.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def add(self, record: Record, size: int, accessed: int) -> None:
        fields = (record.key, record.place, record.tokens, record.provenance, record.method, record.local_start)
        rest = (record.lossy, record.meta, size, accessed, first_of(record.tokens))
        self._connection.execute(_ADD, fields + rest)

    def drop(self, key: bytes) -> None:
        self._connection.execute("DELETE FROM entry WHERE key = ?", (key,))

    def touch(self, accessed: Iterable[tuple[bytes, int]]) -> None:
        rows = ((when, key, when) for key, when in accessed)
        self._connection.executemany("UPDATE entry SET accessed = ? WHERE key = ? AND accessed < ?", rows)

    def oldest(self, count: int) -> Sequence[tuple[bytes, int]]:
        query = "SELECT key, bytes FROM entry ORDER BY accessed, id LIMIT ?"
        return self._connection.execute(query, (count,)).fetchall()

    @property
    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        return self._connect("rw") if connection is None else connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError("the index is closed")
            # A thread may close another's connection; each uses its own alone.
            connection = sqlite3.connect(
                f"{self.path.as_uri()}?mode={mode}",
                uri=True,
                timeout=_PATIENCE,
                isolation_level=None,
                check_same_thread=False,
            )
            self._connections.append(connection)
        # Without a sync at each commit a power cut may lose the latest rows, but tears nothing.
        connection.execute("PRAGMA synchronous = NORMAL")
        self._own.connection = connection
        return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL").fetchall()}
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if not names and version == 0:
        connection.executescript(_SCHEMA)
        return
    if names != _NAMES or version != FORMAT:
        raise sqlite3.DatabaseError("the index is of another version")
    if connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
        raise sqlite3.DatabaseError("the index is damaged")
    if connection.execute(_SUMS).fetchall() != [(1,)]:
        raise sqlite3.DatabaseError("the index does not add up")


def _record(row: Sequence[Any]) -> Record:
    key, place, tokens, provenance, method, local_start, lossy, meta = row[:8]
    return Record(key, place, tokens, provenance, method, local_start, bool(lossy), meta)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
