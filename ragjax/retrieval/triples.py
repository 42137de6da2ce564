"""Facts: triples, the relation paths that walk them, the subgraph of an entity, and the store of triples.

What is retrieved around an entity is written as relation paths that start there, "A -likes-> B -type-> C", and paths
that share their first steps share the KV of these steps (DepCache, GraphRAG, sections 2.2 and 3.1).

The store is pyoxigraph's, on disk or in memory. It keeps RDF. An entity or relation is any text, so its IRI is that
text percent-encoded (RFC 3986), which can be undone. Aliases are literals in a named graph of their own, so that they
count as no triples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

import pyoxigraph as ox

from ragjax.core import ConfigError, DamageError, RequestError, is_unicode
from ragjax.retrieval.database import seal, verify_sealed

INVERSE = " (inverse)"
"""What ends a relation that a path walks against its direction."""


class Triple(NamedTuple):
    head: str
    relation: str
    tail: str

    def forward(self) -> Triple:
        """The same fact with its relation in its own direction."""
        head, relation, tail = self
        while relation.endswith(INVERSE):
            head, relation, tail = tail, relation.removesuffix(INVERSE), head
        return Triple(head, relation, tail)


@dataclass(frozen=True)
class RelationPath:
    """A walk over triples: `steps` are entity, relation, entity, …, and end with an entity.

    score: similarity to the question; it makes no path another one.

    Raises:
        RequestError: the steps are no path, one of them is blank or not valid Unicode, or an entity comes twice.
    """

    steps: tuple[str, ...]
    score: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if len(self.steps) < 3 or len(self.steps) % 2 == 0:
            raise _wrong(f"a path is entity, relation, entity, …, so 3, 5, 7, … texts, not {len(self.steps)}")
        if not all(step.removesuffix(INVERSE).strip() for step in self.steps):
            raise _wrong("an entity or relation of a path is empty; give each a name")
        if not is_unicode("".join(self.steps)):
            raise _wrong("a path is not valid Unicode (half of a surrogate pair); send UTF-8 text")
        seen: set[str] = set()
        for name in self.entities:
            if name in seen:
                raise _wrong(f"a path comes to entity {name!r} twice; cut it before the second time")
            seen.add(name)

    @property
    def entities(self) -> tuple[str, ...]:
        return self.steps[::2]

    @property
    def text(self) -> str:
        return path_text(self.steps)

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The facts that it walks, in order, each in its own direction."""
        hops = zip(self.steps[:-2:2], self.steps[1::2], self.steps[2::2], strict=True)
        return tuple(Triple(*hop).forward() for hop in hops)

    def begins(self, other: RelationPath) -> bool:
        return other.steps[: len(self.steps)] == self.steps


@dataclass(frozen=True)
class Subgraph:
    """Relation paths around one entity, without repetition and sorted by their steps.

    So equal sets of paths make equal prompts, and paths that share their first steps stand side by side.
    """

    entity: str
    paths: tuple[RelationPath, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(sorted(dict.fromkeys(self.paths), key=lambda path: path.steps)))


def subgraphs_of(paths: Iterable[RelationPath]) -> tuple[Subgraph, ...]:
    """A subgraph for each entity that paths begin at, as these first come."""
    found: dict[str, list[RelationPath]] = {}
    for path in paths:
        found.setdefault(path.steps[0], []).append(path)
    return tuple(Subgraph(entity, tuple(own)) for entity, own in found.items())


def path_text(steps: Iterable[str]) -> str:
    return "".join(f" -{step}-> " if i % 2 else step for i, step in enumerate(steps))


def maximal(paths: Iterable[RelationPath]) -> tuple[RelationPath, ...]:
    """The paths, sorted, that begin no other one, which would say them again."""
    ordered = sorted(dict.fromkeys(paths), key=lambda path: path.steps)
    # sorted, a path that begins any other one begins the next
    pairs = zip_longest(ordered, ordered[1:])
    return tuple(path for path, after in pairs if after is None or not path.begins(after))


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="rag.graph.relation_paths", code="invalid_value")


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
    entity: str
    name: str


class OxigraphStore:
    """A set of triples, and other names of entities, in a directory that is made if need be; None keeps it in memory.

    One thread at a time writes; any number may read meanwhile. Every call may raise DamageError.
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
        digests = {} if self._path is None else verify_sealed(self._path)
        self._store = ox.Store(self._path)
        try:
            if self._path is not None:
                seal(self._path, digests)
            self._count = len(self._store) - sum(1 for _ in self.aliases())
        except BaseException:
            self._store = None  # which lets go of it
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
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

    def add_triples(self, triples: Iterable[Triple]) -> int:
        """Store triples, each in its own direction, and say how many were new. RequestError: a name is blank."""
        before = self._count
        for batch in batches(triples, BATCH):
            quads = dict.fromkeys(self._quad(triple) for triple in batch)
            with self._writing:
                fresh = [quad for quad in quads if quad not in self._live]
                with self._reading():
                    (self._live.bulk_extend if len(fresh) >= _BULK else self._live.extend)(fresh)
                self._count += len(fresh)
        return self._count - before

    def delete_triples(self, triples: Iterable[Triple]) -> int:
        gone = 0
        with self._writing, self._reading():
            for quad in dict.fromkeys(self._quad(triple) for triple in triples):
                if quad in self._live:
                    self._live.remove(quad)
                    gone += 1
            self._count -= gone
        return gone

    def __len__(self) -> int:
        return self._count

    def entities(self) -> Iterator[str]:
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

    def aliases(self) -> Iterator[Alias]:
        with self._reading():
            for quad in self._live.quads_for_pattern(None, _ALIAS, None, _ALIASES):
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
                seal(self._path)

    def _around(self, node: ox.NamedNode) -> tuple[Iterator[ox.Quad], Iterator[ox.Quad]]:
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
    """The same fact with its relation in its own direction; RequestError if a name is blank or not valid Unicode."""
    return Triple(*map(_checked, triple.forward()))


def batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
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
