"""Paths of a graph from the entities of a question, as retrieval makes them: simple, and of a few hops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ragjax.retrieval.triples import INVERSE, Triple
from train.sample import Steps

MOST_ENUMERATED = 20_000
"""Walks of one length from an entity that are looked at: a hub of a large graph has more than fit into memory."""


@dataclass(frozen=True)
class Limits:
    """Limits of the paths of a question, of all its entities (DepCache, section 3.3: 30 paths of 2 hops an entity)."""

    paths: int = 30
    hops: int = 3


class Graph:
    """Triples by entity, walked in both directions."""

    def __init__(self, triples: Iterable[Triple]):
        """Duplicates count once; edges keep the order of the triples."""
        self.edges: dict[str, list[tuple[str, str]]] = {}
        for head, relation, tail in dict.fromkeys(triples):
            self.edges.setdefault(head, []).append((relation, tail))
            self.edges.setdefault(tail, []).append((relation + INVERSE, head))

    def walks(self, entity: str, hops: int) -> Iterator[Steps]:
        """Paths from an entity, none to an entity twice; short ones first, at most `MOST_ENUMERATED` of a length."""
        level: list[Steps] = [(entity,)]
        for _ in range(hops):
            level = list(islice((longer for steps in level for longer in self._onward(steps)), MOST_ENUMERATED))
            yield from level

    def _onward(self, steps: Steps) -> Iterator[Steps]:
        for relation, other in self.edges.get(steps[-1], ()):
            if other not in steps[::2]:
                yield (*steps, relation, other)


def around(
    graph: Graph, entities: Sequence[str], gold: Sequence[Steps], limits: Limits, seed: Sequence[int]
) -> tuple[Steps, ...]:
    """The gold paths, all of them, and others from the entities up to `limits.paths`, shuffled; none begins another."""
    random = np.random.default_rng(seed)
    others = [steps for entity in dict.fromkeys(entities) for steps in graph.walks(entity, limits.hops)]
    chosen = list(dict.fromkeys(gold))
    for i in random.permutation(len(others)):
        if len(chosen) >= limits.paths:
            break
        if not any(_begins(a, b) for c in chosen for a, b in ((others[i], c), (c, others[i]))):
            chosen.append(others[i])
    return tuple(chosen[i] for i in random.permutation(len(chosen)))


def _begins(a: Steps, b: Steps) -> bool:
    return b[: len(a)] == a
