"""Embeddings of entity names, in memory and beside a stored graph in SQLite, and the nearest names to a question.

The file is a cache of the graph: names that are missing are embedded when the graph is opened, and those of another
encoder are embedded again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ragjax.retrieval.checksum import checksum
from ragjax.retrieval.database import compare, exclusive, grow, transaction
from ragjax.retrieval.index import NONE, IndexKind, VectorIndex, Vectors
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.retrieval.triples import batches

_BATCH = 1_024  # names embedded and committed together: what a kill can cost
_SCHEMA = """
create table if not exists encoder (identity text not null);
create table if not exists names (
    number integer primary key autoincrement, name text not null unique, embedding blob, checksum blob
);
"""

_log = logging.getLogger(__name__)


class Register:
    """Names, each with its embedding. One thread at a time may write; any number may search meanwhile.

    place: file that keeps the embeddings; None keeps them in memory alone.

    Raises:
        ConfigError: the file cannot be used, or another process has it open.
    """

    def __init__(self, encoder: TextEncoder, place: Path | None = None):
        self._encoder = encoder
        self._writing = threading.Lock()
        self._index = VectorIndex(IndexKind.FLAT, encoder.dim)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        remedy = "delete it, and the names are embedded again"
        self._database = exclusive(place, lambda database: _prepare(database, encoder.identity), remedy)
        self._load()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._numbers)

    def add(self, names: Iterable[str], progress: Callable[[int], None] | None = None) -> int:
        """Embed those names that are new, and say how many they were. progress: called with the number done.

        Raises:
            ConfigError: the file cannot be written.
        """
        fresh = [name for name in dict.fromkeys(names) if name not in self._numbers]
        done = 0
        with self._writing:
            for batch in batches(fresh, _BATCH):
                self._store(batch, self._encoder.encode(batch))
                done += len(batch)
                if progress is not None:
                    progress(done)
        return done

    def remove(self, names: Iterable[str]) -> None:
        """Forget names; those that are not there do not matter.

        Raises:
            ConfigError: the file cannot be written.
        """
        with self._writing:
            gone = {number: name for name in names if (number := self._numbers.pop(name, None)) is not None}
            for number in gone:
                self._names.pop(number)
            with transaction(self._database):
                self._database.executemany("delete from names where number = ?", [(number,) for number in gone])
            self._index.remove(gone)

    def nearest(self, text: str, k: int) -> list[tuple[str, float]]:
        """The k names most similar to a text, best first, with their cosine similarity."""
        if k < 1 or not text.strip() or not self._numbers:
            return []
        numbers, scores = self._index.search(self._encoder.encode([text])[0], k)
        found = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [(self._names[number], score) for number, score in found if number != NONE and number in self._names]

    def close(self) -> None:
        """Release the file. Using the register afterwards is an error."""
        with self._writing:
            self._database.close()

    def _load(self) -> None:
        rows = self._database.execute("select number, name, embedding from names order by number").fetchall()
        if not rows:
            return
        vectors = np.frombuffer(b"".join(row[2] for row in rows), np.float32).reshape(len(rows), self._encoder.dim)
        self._keep([(number, name) for number, name, _ in rows], vectors)

    def _store(self, names: list[str], vectors: Vectors) -> None:
        known = [(name, row.tobytes()) for name, row in zip(names, vectors, strict=True)]
        sql = "insert into names (name, embedding, checksum) values (?, ?, ?)"
        with transaction(self._database):
            numbers = [self._database.execute(sql, (*values, checksum(values))).lastrowid or 0 for values in known]
        self._keep(list(zip(numbers, names, strict=True)), vectors)

    def _keep(self, numbered: list[tuple[int, str]], vectors: Vectors) -> None:
        self._names.update(numbered)  # before they can be found
        self._index.add(np.array([number for number, _ in numbered], np.int64), vectors)
        self._numbers.update((name, number) for number, name in numbered)


def _prepare(database: sqlite3.Connection, identity: str) -> None:
    database.executescript(_SCHEMA)
    with database:
        if grow(database, "names", "checksum", "blob"):
            database.execute("delete from names")  # nothing tells whether they are as they were written
        compare(database, _SCHEMA)
        _fit(database, identity)
    for name, embedding, known in database.execute("select name, embedding, checksum from names"):
        if known != checksum((name, embedding)):
            raise sqlite3.DatabaseError("a name is not as it was written")


def _fit(database: sqlite3.Connection, identity: str) -> None:
    """Drop the embeddings of another encoder."""
    stored = None
    with suppress(TypeError):
        (stored,) = database.execute("select identity from encoder").fetchone()
    if stored == identity:
        return
    if stored is not None:
        _log.warning("the names of the graph were embedded by another encoder; they are embedded again")
    database.execute("delete from names")
    database.execute("delete from encoder")
    database.execute("insert into encoder values (?)", (identity,))
