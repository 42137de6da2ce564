"""The triples of a knowledge graph, kept by pyoxigraph on disk or in memory.

pyoxigraph keeps RDF. An entity or relation is any text, so its IRI is that text percent-encoded (RFC 3986), which can
be undone. Aliases are literals in a named graph of their own, so that they count as no triples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

import pyoxigraph as ox

from ragjax.core import ConfigError, DamageError, RequestError, is_unicode
from ragjax.retrieval import seal
from ragjax.retrieval.path import Triple

BATCH = 50_000
"""Triples that are stored together: what a kill can cost, and what memory an import takes."""

_BULK = 10_000  # from here on new files are cheaper than transactions
_NODES = 2**16  # encoded names kept at hand: in real graphs few entities have most of the edges
_ENTITY, _RELATION = "entity:", "relation:"
_ALIAS = ox.NamedNode("http://www.w3.org/2004/02/skos/core#altLabel")
_ALIASES = ox.NamedNode("graph:aliases")
_TRIPLES = ox.DefaultGraph()

_Item = TypeVar("_Item")


class Alias(NamedTuple):
    """Another name of an entity."""

    entity: str
    name: str


class OxigraphStore:
    """A set of triples, and other names of entities, in a directory that is made if need be; None keeps it in memory.

    One thread at a time writes; any number may read meanwhile.

    Raises:
        ConfigError: the directory cannot be used, or another process has it open.
        DamageError: it is damaged; so does every other call if that comes to light later.
    """

    def __init__(self, path: str | Path | None = None):
        self._node = lru_cache(_NODES)(_node)
        self._decoded = lru_cache(_NODES)(_decoded)
        self._writing = threading.Lock()
        self._path = None if path is None else Path(path)
        self._store: ox.Store | None = None
        try:
            with self._reading():
                self._open()
        except OSError as error:
            # whoever has it open also removes files, between one look at them and the next
            used = "lock" in str(error).lower() or isinstance(error, FileNotFoundError)
            hint = "; another process has it open" if used else ""
            raise ConfigError(f"{path}: cannot be opened as a store of triples: {error}{hint}") from error

    def _open(self) -> None:
        digests = {} if self._path is None else seal.verify(self._path)
        self._store = ox.Store(self._path)
        try:
            if self._path is not None:
                seal.unseal(self._path, digests)
            self._count = len(self._store) - sum(1 for _ in self.aliases())
        except BaseException:
            self._store = None  # which lets go of it
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is wrong with the files under the database is told as their damage."""
        try:
            yield
        except (RuntimeError, DamageError) as error:
            reason = " ".join(str(error).split())
            raise DamageError(
                f"{self._path}: the store of triples is damaged ({reason}); delete it and import again"
            ) from error

    @property
    def _live(self) -> ox.Store:
        if self._store is None:
            raise ValueError("the store of triples is closed")
        return self._store

    def add(self, triples: Iterable[Triple]) -> int:
        """Store triples, and say how many were new. Those that the iterable repeats, or that are there, count once.

        A relation that ends in " (inverse)" is stored in its own direction.

        Raises:
            RequestError: a name is blank or not valid Unicode. Up to BATCH triples before it may be stored or not.
        """
        return sum(map(self._add, batches(triples, BATCH)))

    def _add(self, batch: list[Triple]) -> int:
        quads = dict.fromkeys(self._quad(triple) for triple in batch)
        with self._writing:
            fresh = [quad for quad in quads if quad not in self._live]
            with self._reading():
                (self._live.bulk_extend if len(fresh) >= _BULK else self._live.extend)(fresh)
            self._count += len(fresh)
        return len(fresh)

    def delete(self, triples: Iterable[Triple]) -> int:
        """Remove triples, and say how many were there."""
        gone = 0
        with self._writing, self._reading():
            for quad in dict.fromkeys(self._quad(triple) for triple in triples):
                if quad in self._live:
                    self._live.remove(quad)
                    gone += 1
            self._count -= gone
        return gone

    def __len__(self) -> int:
        """Number of triples."""
        return self._count

    def entities(self) -> Iterator[str]:
        """Every head and tail, once, in no particular order."""
        with self._reading():
            rows = self._live.query("SELECT DISTINCT ?e {{?e ?r ?t} UNION {?h ?r ?e}}")
            assert isinstance(rows, ox.QuerySolutions)
            yield from (_decoded(_iri(row["e"])) for row in rows)

    def edges(self, entity: str, limit: int) -> tuple[Triple, ...]:
        """At most `limit` triples with the entity as their head, then at most `limit` others with it as their tail.

        Each part is sorted. Which triples are left out is the same until something is written.
        """
        node = self._node(_ENTITY, entity)
        out, into = self._around(node)
        others = (quad for quad in into if quad.subject != node)
        with self._reading():
            return (*self._sorted(islice(out, limit)), *self._sorted(islice(others, limit)))

    def has(self, entity: str) -> bool:
        if not entity.strip() or not is_unicode(entity):
            return False
        node = self._node(_ENTITY, entity)
        with self._reading():
            return any(next(quads, None) is not None for quads in self._around(node))

    def add_aliases(self, aliases: Iterable[Alias]) -> int:
        """Store other names of entities, and say how many were new. They stay when the entity's triples go."""
        quads = dict.fromkeys(
            ox.Quad(self._node(_ENTITY, entity), _ALIAS, ox.Literal(_checked(name)), _ALIASES)
            for entity, name in aliases
        )
        with self._writing:
            fresh = [quad for quad in quads if quad not in self._live]
            with self._reading():
                self._live.extend(fresh)
        return len(fresh)

    def aliases(self, entity: str | None = None) -> Iterator[Alias]:
        """The other names of one entity, or of all."""
        node = None if entity is None else self._node(_ENTITY, entity)
        with self._reading():
            for quad in self._live.quads_for_pattern(node, _ALIAS, None, _ALIASES):
                assert isinstance(quad.object, ox.Literal)
                yield Alias(_decoded(_iri(quad.subject)), quad.object.value)

    def close(self) -> None:
        with self._writing:
            if self._store is None:
                return
            with self._reading():
                self._store.flush()
            self._store = None  # which closes the database
            if self._path is not None:
                seal.seal(self._path)

    def _around(self, node: ox.NamedNode) -> tuple[Iterator[ox.Quad], Iterator[ox.Quad]]:
        """The facts of which an entity is the head, and those of which it is the tail."""
        return (
            self._live.quads_for_pattern(node, None, None, _TRIPLES),
            self._live.quads_for_pattern(None, None, node, _TRIPLES),
        )

    def _sorted(self, quads: Iterable[ox.Quad]) -> list[Triple]:
        terms = ((quad.subject, quad.predicate, quad.object) for quad in quads)
        return sorted(Triple(*(self._decoded(_iri(term)) for term in three)) for three in terms)

    def _quad(self, triple: Triple) -> ox.Quad:
        head, relation, tail = forward(triple)
        return ox.Quad(self._node(_ENTITY, head), self._node(_RELATION, relation), self._node(_ENTITY, tail))


def forward(triple: Triple) -> Triple:
    """The same fact with its relation in its own direction.

    Raises:
        RequestError: a name is blank or not valid Unicode.
    """
    return Triple(*map(_checked, triple.forward()))


def batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """The items in lists of `size`; the last may be shorter."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _checked(name: str) -> str:
    if not name.strip():
        raise RequestError("a triple or alias has a blank name; give each entity and relation one", param="triples")
    if not is_unicode(name):
        raise RequestError(f"name {name!r} is not valid Unicode (half of a surrogate pair); mend it", param="triples")
    return name


def _node(kind: str, name: str) -> ox.NamedNode:
    return ox.NamedNode(kind + quote(_checked(name), safe=""))


def _iri(term: object) -> str:
    assert isinstance(term, ox.NamedNode)
    return term.value


def _decoded(iri: str) -> str:
    return unquote(iri.partition(":")[2])
