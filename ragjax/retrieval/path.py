"""Facts as the prompt holds them: triples, the relation paths that walk them, and the subgraph of an entity.

DepCache (GraphRAG, sections 2.2 and 3.1): what is retrieved around an entity is written as relation paths that start
there, "A -likes-> B -type-> C", and paths that share their first steps share the KV of these steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from ragjax.core import RequestError, is_unicode

INVERSE = " (inverse)"
"""What ends a relation that a path walks against its direction."""

Serialization = Literal["path", "triplet"]
"""Each maximal path, or each triple once, as a path of one hop."""


class Triple(NamedTuple):
    """A fact: head and tail are entities."""

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
        """The entities, in order."""
        return self.steps[::2]

    @property
    def text(self) -> str:
        """As it is embedded and read: "A -relation-> B -relation-> C"."""
        return path_text(self.steps)

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The facts that it walks, in order, each in its own direction."""
        hops = zip(self.steps[:-2:2], self.steps[1::2], self.steps[2::2], strict=True)
        return tuple(Triple(*hop).forward() for hop in hops)

    def begins(self, other: RelationPath) -> bool:
        """Whether the other path starts with all of this one."""
        return other.steps[: len(self.steps)] == self.steps


@dataclass(frozen=True)
class Subgraph:
    """What is told about one entity. Its paths are kept without repetition, sorted by their steps.

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
    """The text of a path with these steps."""
    return "".join(f" -{step}-> " if i % 2 else step for i, step in enumerate(steps))


def serialize(paths: Iterable[RelationPath], serialization: Serialization) -> tuple[RelationPath, ...]:
    """Relation paths as they are written.

    "path": those that do not begin another one, which would say them again. "triplet": each triple that is walked,
    once, with the score of the best path through it.

    Raises:
        RequestError: if the serialization is neither.
    """
    if serialization == "path":
        return _maximal(paths)
    if serialization == "triplet":
        return _triplets(paths)
    raise RequestError(
        f"unknown serialization {serialization!r}; use 'path' or 'triplet'",
        param="rag.graph.serialization",
        code="invalid_value",
    )


def _maximal(paths: Iterable[RelationPath]) -> tuple[RelationPath, ...]:
    ordered = sorted(dict.fromkeys(paths), key=lambda path: path.steps)
    # sorted, a path that begins any other one begins the next
    return tuple(path for path, after in zip_longest(ordered, ordered[1:]) if after is None or not path.begins(after))


def _triplets(paths: Iterable[RelationPath]) -> tuple[RelationPath, ...]:
    best: dict[Triple, float] = {}
    for path in paths:
        for triple in path.triples:
            best[triple] = max(path.score, best.get(triple, path.score))
    return tuple(RelationPath(tuple(triple), score) for triple, score in best.items())


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="rag.graph.relation_paths", code="invalid_value")
