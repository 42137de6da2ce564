"""Facts for a request: what a knowledge graph has to say to it, as much as fits its prompt (DepCache, section 3.3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragjax.core import FactReport, Graph, Notice, Prompt
from ragjax.retrieval.triples import RelationPath, Subgraph, maximal, subgraphs_of

if TYPE_CHECKING:
    from ragjax.retrieval.graph import KnowledgeGraph


@dataclass(frozen=True)
class GroundedFacts:
    prompt: Prompt
    subgraphs: tuple[Subgraph, ...]
    notices: tuple[str, ...]

    @property
    def facts(self) -> tuple[FactReport, ...]:
        return tuple(FactReport(s.entity, path.steps, path.score) for s in self.subgraphs for path in s.paths)


def gather(
    graph: KnowledgeGraph | None, asked: Graph, question: str, check: Callable[[], None] = lambda: None
) -> tuple[Subgraph, ...]:
    """The paths given with the request, or those around the question's entities in the graph; may be empty."""
    if asked.relation_paths is not None:
        return subgraphs_of(maximal(map(RelationPath, asked.relation_paths)))
    assert graph is not None
    given = {"hops": asked.hops, "paths": asked.paths}
    limits = {name: value for name, value in given.items() if value is not None}
    return graph.subgraphs(question, asked.entities, check=check, **limits)


def ground(subgraphs: Sequence[Subgraph], build: Callable[[Sequence[Subgraph]], Prompt], room: int) -> GroundedFacts:
    """The prompt with as many paths as fit into `room` tokens, those least similar to the question left out."""
    if not subgraphs:
        told = Notice("no entity of the graph is meant by the question: answered without facts", "no_entity")
        return GroundedFacts(build(()), (), (told,))
    prompt = build(subgraphs)
    if len(prompt) <= room:
        return GroundedFacts(prompt, tuple(subgraphs), ())
    best = sorted((path.score for s in subgraphs for path in s.paths), reverse=True)
    fits = bisect_right(range(len(best)), room, lo=1, key=lambda n: len(build(_foremost(subgraphs, n)))) - 1
    kept = _foremost(subgraphs, fits)
    left = f"{len(best) - fits} of {len(best)} relation paths"
    return GroundedFacts(build(kept), kept, (f"{left}, those least similar to the question, did not fit the context",))


def _foremost(subgraphs: Sequence[Subgraph], count: int) -> tuple[Subgraph, ...]:
    ranked = sorted(((s.entity, path) for s in subgraphs for path in s.paths), key=lambda pair: -pair[1].score)
    kept = set(ranked[:count])
    cut = (replace(s, paths=tuple(path for path in s.paths if (s.entity, path) in kept)) for s in subgraphs)
    return tuple(s for s in cut if s.paths)
