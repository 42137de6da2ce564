"""Entities by name: embeddings of names and the nearest of them to a question, and the names that stand in a text.

Embeddings are in memory and beside a stored graph in SQLite. The file is a cache of the graph: names that are missing
are embedded when the graph is opened, and those of another encoder are embedded again.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ragjax.retrieval.database import add_column, checksum, compare_schema, exclusive, transaction
from ragjax.retrieval.index import NONE, IndexKind, VectorIndex, Vectors
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.retrieval.triples import Alias, batches

_BATCH = 1_024  # names embedded and committed together: what a kill can cost
_SCHEMA = """
create table if not exists encoder (identity text not null);
create table if not exists names (
    number integer primary key autoincrement, name text not null unique, embedding blob, checksum blob
);
"""

_log = logging.getLogger(__name__)


class EntityIndex:
    """Names, each with its embedding. One thread at a time may write; any number may search meanwhile.

    place: file that keeps the embeddings; None keeps them in memory alone.
    """

    def __init__(self, encoder: TextEncoder, place: Path | None = None):
        self._encoder = encoder
        self._writing = threading.Lock()
        self._index = VectorIndex(IndexKind.FLAT, encoder.dim)
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        remedy = "delete it, and the names are embedded again"
        self._database = exclusive(place, lambda database: _prepare(database, encoder.identity), remedy)
        if rows := self._database.execute("select number, name, embedding from names order by number").fetchall():
            vectors = np.frombuffer(b"".join(row[2] for row in rows), np.float32).reshape(len(rows), encoder.dim)
            self._keep([(number, name) for number, name, _ in rows], vectors)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._numbers)

    def add_names(self, names: Iterable[str], progress: Callable[[int], None] | None = None) -> None:
        """Embed those names that are new. progress: called with the number done."""
        fresh = [name for name in dict.fromkeys(names) if name not in self._numbers]
        sql = "insert into names (name, embedding, checksum) values (?, ?, ?)"
        done = 0
        with self._writing:
            for batch in batches(fresh, _BATCH):
                vectors = self._encoder.encode(batch)
                known = [(name, row.tobytes()) for name, row in zip(batch, vectors, strict=True)]
                with transaction(self._database):
                    found = [self._database.execute(sql, (*values, checksum(values))) for values in known]
                self._keep([(one.lastrowid or 0, name) for one, name in zip(found, batch, strict=True)], vectors)
                done += len(batch)
                if progress is not None:
                    progress(done)

    def remove_names(self, names: Iterable[str]) -> None:
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
        numbers, scores = self._index.search(self._encoder.encode([text], query=True)[0], k)
        found = zip(numbers.tolist(), scores.tolist(), strict=True)
        return [(self._names[number], score) for number, score in found if number != NONE and number in self._names]

    def close(self) -> None:
        with self._writing:
            self._database.close()

    def _keep(self, numbered: list[tuple[int, str]], vectors: Vectors) -> None:
        self._names.update(numbered)  # before they can be found
        self._index.add(np.array([number for number, _ in numbered], np.int64), vectors)
        self._numbers.update((name, number) for number, name in numbered)


def _prepare(database: sqlite3.Connection, identity: str) -> None:
    database.executescript(_SCHEMA)
    with database:
        if add_column(database, "names", "checksum", "blob"):
            database.execute("delete from names")  # nothing tells whether they are as they were written
        compare_schema(database, _SCHEMA)
        stored = next((row[0] for row in database.execute("select identity from encoder")), None)
        if stored != identity:
            if stored is not None:
                _log.warning("the names of the graph were embedded by another encoder; they are embedded again")
            database.execute("delete from names")
            database.execute("delete from encoder")
            database.execute("insert into encoder values (?)", (identity,))
    for name, embedding, known in database.execute("select name, embedding, checksum from names"):
        if known != checksum((name, embedding)):
            raise sqlite3.DatabaseError("a name is not as it was written")


_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han: each character is a word
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_SHORT = 3  # letters of a name that must be spelled as it is: "It" is a film, "it" is none

How = Literal["exact", "alias"]

MAX_WORDS = 64
"""Words of the longest name that is found in a text. Longer ones are texts themselves, as a graph's literals may be."""


class Mention(NamedTuple):
    """A name in a text: the entity, how it is named, and the range of words that name it."""

    entity: str
    how: How
    begin: int
    end: int


@dataclass(frozen=True)
class _SplitText:
    text: str
    starts: tuple[int, ...]
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join(self.words)

    def spells(self, name: str, word: int) -> bool:
        """Tell if the name stands at that word exactly as it is written."""
        own = _split(name)
        begin = self.starts[word] - own.starts[0]
        return begin >= 0 and self.text.startswith(own.text, begin)


def _split(text: str) -> _SplitText:
    text = unicodedata.normalize("NFC", text)
    found = list(_WORD.finditer(text))
    words = (unicodedata.normalize("NFKC", word.group()).casefold() for word in found)
    return _SplitText(text, tuple(word.start() for word in found), tuple(words))


class Lexicon:
    """Names of entities, by their words. One thread at a time may write while others search."""

    def __init__(self) -> None:
        self._entities: dict[str, tuple[str, ...]] = {}
        self._aliases: dict[str, tuple[Alias, ...]] = {}
        self._longest = 0  # words of a name, up to MAX_WORDS

    def add_entity(self, entity: str) -> None:
        """A name without letters and digits is never found in a text."""
        key = self._key(entity)
        if key and entity not in self._entities.get(key, ()):
            self._entities[key] = (*self._entities.get(key, ()), entity)

    def add_alias(self, alias: Alias) -> None:
        key = self._key(alias.name)
        if key and alias not in self._aliases.get(key, ()):
            self._aliases[key] = (*self._aliases.get(key, ()), alias)

    def remove_entity(self, entity: str) -> None:
        """Forget an entity's name; its aliases are kept."""
        key = _split(entity).key
        left = tuple(name for name in self._entities.get(key, ()) if name != entity)
        if left:
            self._entities[key] = left
        else:
            self._entities.pop(key, None)

    def named(self, name: str) -> tuple[str, ...]:
        key = _split(name).key
        return self._entities.get(key) or tuple(dict.fromkeys(alias.entity for alias in self._aliases.get(key, ())))

    def mentions(self, text: str, known: Container[str]) -> tuple[Mention, ...]:
        """Find the names in a text, in its order.

        known: the entities that count; names of others hide none of theirs. Where names overlap the longest counts, and
        of equally long ones the first. Several entities that go by the same words are all found, unless some are
        spelled in the text as they are. Names of more than MAX_WORDS words are not looked for.
        """
        words = _split(text)
        found: list[tuple[int, int, tuple[Mention, ...]]] = []
        for begin in range(len(words.words)):
            key = ""
            for end, word in enumerate(words.words[begin : begin + self._longest], begin + 1):
                key = f"{key} {word}" if key else word
                if (key in self._entities or key in self._aliases) and (
                    mentions := self._at(words, key, begin, end, known)
                ):
                    found.append((begin - end, begin, mentions))
        taken: set[int] = set()
        chosen: list[Mention] = []
        for _, _, mentions in sorted(found, key=lambda entry: entry[:2]):
            span = range(mentions[0].begin, mentions[0].end)
            if taken.isdisjoint(span):
                taken.update(span)
                chosen += mentions
        return tuple(sorted(chosen, key=lambda mention: mention.begin))

    def _key(self, name: str) -> str:
        text = _split(name)
        self._longest = max(self._longest, min(len(text.words), MAX_WORDS))
        return text.key

    def _at(self, text: _SplitText, key: str, begin: int, end: int, known: Container[str]) -> tuple[Mention, ...]:
        entities = (name for name in self._entities.get(key, ()) if name in known)
        written: list[tuple[str, str, How]] = [(name, name, "exact") for name in entities]
        if not written:
            aliases = (alias for alias in self._aliases.get(key, ()) if alias.entity in known)
            written = [(alias.name, alias.entity, "alias") for alias in aliases]
        spelled = [entry for entry in written if text.spells(entry[0], begin)]
        if spelled:  # "C" is spelled in "C++", too
            longest = max(len(entry[0]) for entry in spelled)
            written = [entry for entry in spelled if len(entry[0]) == longest]
        elif len(key) <= _SHORT and key.isascii():
            return ()
        return tuple(Mention(entity, how, begin, end) for _, entity, how in written)
