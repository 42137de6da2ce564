"""Facts: triples, the relation paths that walk them, and the subgraph of an entity.

What is retrieved around an entity is written as relation paths that start there, "A -likes-> B -type-> C", and paths
that share their first steps share the KV of these steps (DepCache, GraphRAG, sections 2.2 and 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from ragjax.core import RequestError, invalid, is_unicode

PATHS = "rag.graph.relation_paths"
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
            raise invalid(PATHS, f"a path is entity, relation, entity, …, so 3, 5, 7, … texts, not {len(self.steps)}")
        if not all(step.removesuffix(INVERSE).strip() for step in self.steps):
            raise invalid(PATHS, "an entity or relation of a path is empty; give each a name")
        if not is_unicode("".join(self.steps)):
            raise invalid(PATHS, "a path is not valid Unicode (half of a surrogate pair); send UTF-8 text")
        seen: set[str] = set()
        for name in self.entities:
            if name in seen:
                raise invalid(PATHS, f"a path comes to entity {name!r} twice; cut it before the second time")
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


class Alias(NamedTuple):
    entity: str
    name: str


def forward(triple: Triple) -> Triple:
    """The same fact with its relation in its own direction; RequestError if a name is blank or not valid Unicode."""
    return Triple(*map(checked_name, triple.forward()))


def checked_name(name: str) -> str:
    if not name.strip():
        raise RequestError("a triple or alias has a blank name; give each entity and relation one", param="triples")
    if not is_unicode(name):
        raise RequestError(f"name {name!r} is not valid Unicode (half of a surrogate pair); mend it", param="triples")
    return name
