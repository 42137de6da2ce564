"""The facts of a graph in one SQLite file: triples, other names of entities, and the embeddings of entities' names.

An entity is what a triple has at its head or tail. Triples and aliases are in an index too, and names have checksums:
what is damaged is found when the file is opened.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ragjax.core import DamageError
from ragjax.retrieval.database import checksum, compare_schema, exclusive, transaction
from ragjax.retrieval.index import NONE, IndexKind, VectorIndex, Vectors
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.retrieval.triples import Alias, Triple, checked_name, forward

_TOGETHER = 1_024  # names that are embedded
_SCHEMA = """
create table if not exists encoder (identity text not null);
create table if not exists triples (
    head text not null, relation text not null, tail text not null, primary key (head, relation, tail)
) without rowid;
create index if not exists triples_by_tail on triples (tail, relation, head);
create table if not exists aliases (
    entity text not null, name text not null, primary key (entity, name)
) without rowid;
create index if not exists aliases_by_name on aliases (name, entity);
create table if not exists names (
    number integer primary key autoincrement, name text not null unique, embedding blob not null, checksum blob not null
);
"""
_HAS_ONE = "select exists (select 1 from triples where head = ?) or exists (select 1 from triples where tail = ?)"

_log = logging.getLogger(__name__)


class FactStore:
    """Facts in a file that is made if need be; None keeps them in memory.

    One thread at a time writes; any number may read meanwhile. Every call may raise DamageError.
    """

    def __init__(self, place: Path | None, encoder: TextEncoder):
        self._place = place
        self._encoder = encoder
        self._lock = threading.Lock()  # the connection
        self._index = VectorIndex(IndexKind.FLAT, encoder.dim)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._database = exclusive(place, _prepare, "delete it and import the facts again")
        try:
            self._count: int = self._rows("select count(*) from triples")[0][0]
            self._load_names()
        except BaseException:
            self._database.close()
            raise

    def _load_names(self) -> None:
        known = [identity for (identity,) in self._rows("select identity from encoder")]
        rows = self._rows("select number, name, embedding from names order by number")
        if known == [self._encoder.identity]:
            vectors = np.frombuffer(b"".join(row[2] for row in rows), np.float32).reshape(len(rows), self._encoder.dim)
            self._keep([(number, name) for number, name, _ in rows], vectors)
            return
        if known:
            _log.warning("the names of the graph were embedded by another encoder; they are embedded again")
        names = [name for _, name, _ in rows]
        vectors = self._embedded(names)
        with self._change() as database:
            database.execute("delete from names")
            database.execute("delete from encoder")
            database.execute("insert into encoder values (?)", (self._encoder.identity,))
            numbered = _insert_names(database, names, vectors)
        self._keep(numbered, vectors)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entity: object) -> bool:
        return entity in self._numbers

    @property
    def entities(self) -> Collection[str]:
        return self._numbers.keys()

    def add_facts(self, triples: Sequence[Triple], aliases: Sequence[Alias] = ()) -> tuple[int, list[str]]:
        """Store triples, each in its own direction, and aliases; the number of new triples, and the new entities.

        Aliases stay when the entity's triples go. RequestError: a name is blank or not valid Unicode.
        """
        facts, others = [forward(triple) for triple in triples], [[*map(checked_name, alias)] for alias in aliases]
        ends = dict.fromkeys(name for head, _, tail in facts for name in (head, tail))
        fresh = [name for name in ends if name not in self._numbers]
        vectors = self._embedded(fresh)
        with self._change() as database:
            new = database.executemany("insert or ignore into triples values (?, ?, ?)", facts).rowcount
            database.executemany("insert or ignore into aliases values (?, ?)", others)
            numbered = _insert_names(database, fresh, vectors)
        self._keep(numbered, vectors)
        self._count += new
        return new, fresh

    def delete_facts(self, triples: Sequence[Triple]) -> tuple[int, list[str]]:
        """Remove triples; the number of those that were there, and the entities that have none any more."""
        facts = [forward(triple) for triple in triples]
        ends = dict.fromkeys(name for head, _, tail in facts for name in (head, tail) if name in self._numbers)
        with self._change() as database:
            sql = "delete from triples where head = ? and relation = ? and tail = ?"
            gone = database.executemany(sql, facts).rowcount
            left = [name for name in ends if not database.execute(_HAS_ONE, (name, name)).fetchone()[0]]
            database.executemany("delete from names where name = ?", [(name,) for name in left])
        self._count -= gone
        numbers = [self._numbers.pop(name) for name in left]
        for number in numbers:
            del self._names[number]
        self._index.remove(numbers)
        return gone, left

    def others(self, triples: Collection[Triple]) -> list[Triple]:
        """All triples but these."""
        return [one for row in self._rows("select * from triples") if (one := Triple(*row)) not in triples]

    def edges(self, entity: str, limit: int) -> tuple[Triple, ...]:
        """At most `limit` triples with the entity as their head, then at most `limit` others with it as their tail.

        Each part is sorted. Which triples are left out is the same until something is written.
        """
        out = "select * from triples where head = ? order by relation, tail limit ?"
        into = "select * from triples where tail = ? and head <> tail order by relation, head limit ?"
        parts = (self._rows(sql, entity, limit) for sql in (out, into))
        return tuple(triple for part in parts for triple in sorted(Triple(*row) for row in part))

    def aliases(self) -> list[Alias]:
        return [Alias(*row) for row in self._rows("select * from aliases")]

    def nearest(self, text: str, k: int) -> list[tuple[str, float]]:
        """The k entities whose names are most similar to a text, best first, with their cosine similarity."""
        if k < 1 or not text.strip() or not self._numbers:
            return []
        numbers, scores = self._index.search(self._encoder.encode([text], query=True)[0], k)
        found = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [(self._names[number], score) for number, score in found if number != NONE and number in self._names]

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _embedded(self, names: Sequence[str]) -> Vectors:
        parts = [self._encoder.encode(names[at : at + _TOGETHER]) for at in range(0, len(names), _TOGETHER)]
        return np.concatenate([np.empty((0, self._encoder.dim), np.float32), *parts])

    def _keep(self, numbered: Sequence[tuple[int, str]], vectors: Vectors) -> None:
        self._names.update(numbered)  # before they can be found
        self._index.add(np.array([number for number, _ in numbered], np.int64), vectors)
        self._numbers.update((name, number) for number, name in numbered)

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with self._reading():
            return self._database.execute(sql, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._reading(), transaction(self._database):
            yield self._database

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.ProgrammingError:  # it is closed
                raise
            except sqlite3.DatabaseError as error:
                reason = f"the facts are damaged ({error}); delete it and import them again"
                raise DamageError(f"{self._place}: {reason}") from error


def _prepare(database: sqlite3.Connection) -> None:
    database.executescript(f"begin exclusive; {_SCHEMA} commit")
    compare_schema(database, _SCHEMA)
    for name, embedding, known in database.execute("select name, embedding, checksum from names"):
        if known != checksum((name, embedding)):
            raise sqlite3.DatabaseError("a name is not as it was written")


def _insert_names(database: sqlite3.Connection, names: Sequence[str], vectors: Vectors) -> list[tuple[int, str]]:
    """The names with their numbers."""
    sql = "insert into names (name, embedding, checksum) values (?, ?, ?)"
    rows = [(name, vector.tobytes()) for name, vector in zip(names, vectors, strict=True)]
    return [(database.execute(sql, (*row, checksum(row))).lastrowid or 0, row[0]) for row in rows]
