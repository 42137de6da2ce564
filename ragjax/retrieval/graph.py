"""A knowledge graph that is asked: entities of a question, and the relation paths around them that bear on it.

DepCache (GraphRAG, sections 2.2, 3.3 and 6.1): the entities of a question are found, for each of them the paths of up
to two hops are retrieved from the graph, and the 30 most similar to the question are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from ragjax.core import Indexing, RequestError, invalid
from ragjax.core.recent import Recent
from ragjax.retrieval.facts import FactStore
from ragjax.retrieval.index import Vectors
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.retrieval.lexicon import Lexicon
from ragjax.retrieval.triples import INVERSE, Alias, RelationPath, Subgraph, Triple, maximal, path_text

COMPARED = 512
"""Paths from one entity that are compared with the question, about; it bounds the time that a hub can take."""

SIMILAR = 0.5
"""Cosine similarity from which an entity counts as meant by a question that names none."""

_READ = 512  # edges of an entity, each way, among which the ones that are walked are chosen
_BATCH = 2_000  # triples that are stored together: what a kill can cost
_CACHED = 2**15  # embeddings of paths: 48 MiB at 384 dimensions
_DIGITS = 5  # of a score: those behind vary with the texts that were embedded together


Steps = tuple[str, ...]


@dataclass(frozen=True)
class Entity:
    """An entity that a question is about. score: 1, or for "similar" the cosine similarity to the question."""

    name: str
    score: float
    how: Literal["exact", "alias", "similar"]


class KnowledgeGraph:
    """Triples that can be searched by meaning. One thread at a time may write; any number may read meanwhile."""

    def __init__(self, directory: str | Path | None, encoder: TextEncoder):
        """The graph kept in a directory, made if need be; None keeps it in memory. Raises ConfigError."""
        self._facts = FactStore(None if directory is None else Path(directory) / "graph.sqlite", encoder)
        self._encoder = _CachedEncoder(encoder, _CACHED)
        self._lexicon = Lexicon()
        self._writing = threading.Lock()
        self.indexing: Indexing | None = None  # how far its source is read; None: it has none
        for name in self._facts.entities:
            self._lexicon.add_entity(name)
        for alias in self._facts.aliases():
            self._lexicon.add_alias(alias)

    def close(self) -> None:
        with self._writing:
            self._facts.close()

    def __enter__(self) -> KnowledgeGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def entities(self) -> int:
        return len(self._facts.entities)

    def add(self, items: Iterable[Triple | Alias]) -> int:
        """Store triples and aliases, and embed the names of new entities; returns the number of new triples."""
        new, rest = 0, iter(items)
        with self._writing:
            while batch := list(islice(rest, _BATCH)):
                aliases = [item for item in batch if isinstance(item, Alias)]
                added, names = self._facts.add_facts([item for item in batch if isinstance(item, Triple)], aliases)
                new += added
                for alias in aliases:
                    self._lexicon.add_alias(alias)
                for name in names:
                    self._lexicon.add_entity(name)
        return new

    def delete(self, triples: Iterable[Triple]) -> int:
        """Remove triples, and say how many were there. An entity without triples is no entity of the graph any more."""
        with self._writing:
            gone, names = self._facts.delete_facts(list(triples))
            for name in names:
                self._lexicon.remove_entity(name)
        return gone

    def retain(self, triples: Collection[Triple]) -> int:
        """Remove every triple but these, whose relations are in their own direction; the number removed."""
        if len(self._facts) == len(triples):  # as a rule: all of them were just added
            return 0
        return self.delete(self._facts.others(triples))

    def link(self, question: str, limit: int = 10) -> tuple[Entity, ...]:
        """The entities that a question is about, at most `limit`.

        Those that it names, by their name or an alias, at word boundaries and without regard to case, in its order; of
        names that overlap the longest. A name of up to three letters counts where it is spelled as it is. Only if there
        are none: those whose names are most similar to the question, from SIMILAR on, best first.
        """
        how = {mention.entity: mention.how for mention in self._lexicon.mentions(question, self._facts)}
        if how:
            return tuple(Entity(name, 1.0, how[name]) for name in islice(how, limit))
        nearest = self._facts.nearest(question, limit)
        return tuple(Entity(name, score, "similar") for name, score in nearest if score >= SIMILAR)

    def subgraphs(
        self,
        question: str,
        entities: Iterable[str] | None = None,
        hops: int = 2,
        paths: int = 30,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Subgraph, ...]:
        """For each entity the relation paths from it, both ways along triples, that are most similar to the question.

        A path has up to `hops` hops, and no entity twice. Of the paths from an entity the best are taken until there
        are `paths` of which none begins another. An entity with many edges is walked along so many that about COMPARED
        paths are compared, taken in turn from its relations. Entities without a path are left out. entities: names or
        aliases; None: those that the question is about (`link`). RequestError: one is not in the graph.
        """
        for limit, value, most in (("hops", hops, 4), ("paths", paths, COMPARED)):
            if not 1 <= value <= most:
                raise invalid(f"rag.graph.{limit}", f"rag.graph.{limit} must be from 1 to {most}, not {value}")
        names = [entity.name for entity in self.link(question)] if entities is None else self._known(entities)
        fanout = max(2, int(COMPARED ** (1 / hops) + 1e-9))
        walks: dict[str, list[Steps]] = {}
        scores: dict[Steps, float] = {}
        for name in names:
            check()
            walks[name] = self._walks(name, hops, fanout)
            scores |= self._scores(question, walks[name])
        chosen = ((name, _best(steps, scores, paths)) for name, steps in walks.items())
        return tuple(Subgraph(name, maximal(found)) for name, found in chosen if found)

    def _known(self, entities: Iterable[str]) -> list[str]:
        found: dict[str, None] = {}
        for name in entities:
            meant = [name] if name in self._facts else [e for e in self._lexicon.named(name) if e in self._facts]
            if not meant:
                near = ", ".join(repr(entity) for entity, _ in self._facts.nearest(name, 3))
                hint = f"the nearest are {near}" if near else "the graph is empty: import triples first"
                reason = f"entity {name!r} is not in the graph; {hint}"
                raise RequestError(reason, param="rag.graph.entities", code="not_found")
            found |= dict.fromkeys(meant)
        return list(found)

    def _walks(self, entity: str, hops: int, fanout: int) -> list[Steps]:
        """Paths from an entity of up to `hops` hops, the shorter before the longer."""
        memo: dict[str, list[tuple[str, str]]] = {}
        found: list[Steps] = []
        frontier: list[Steps] = [(entity,)]
        for _ in range(hops):
            further: list[Steps] = []
            for path in frontier:
                end, met = path[-1], path[::2]
                if end not in memo:
                    memo[end] = _in_turn(end, self._facts.edges(end, _READ))
                steps = ((*path, relation, other) for relation, other in memo[end] if other not in met)
                further += islice(steps, fanout)
            frontier = further
            found += frontier
        return found

    def _scores(self, question: str, walks: Sequence[Steps]) -> dict[Steps, float]:
        if not walks or not question.strip():
            return dict.fromkeys(walks, 0.0)
        distinct = list(dict.fromkeys(walks))
        query_E = self._encoder.encode([question], query=True)[0]
        paths_PE = self._encoder.encode(list(map(path_text, distinct)))
        return {walk: round(float(score), _DIGITS) for walk, score in zip(distinct, paths_PE @ query_E, strict=True)}


class _CachedEncoder:
    def __init__(self, encoder: TextEncoder, size: int):
        self._encoder = encoder
        self._known = Recent[tuple[str, bool], Vectors](size)

    def encode(self, texts: Sequence[str], query: bool = False) -> Vectors:
        distinct = dict.fromkeys(texts)
        known = {text: row for text in distinct if (row := self._known.get((text, query))) is not None}
        absent = [text for text in distinct if text not in known]
        for text, row in zip(absent, self._encoder.encode(absent, query) if absent else (), strict=True):
            known[text] = row.copy()
            self._known.keep((text, query), known[text])
        return np.stack([known[text] for text in texts])


def _in_turn(entity: str, triples: Iterable[Triple]) -> list[tuple[str, str]]:
    """Steps from an entity along its triples, (relation, other entity): one of each relation and direction in turn."""
    by_relation: dict[str, list[tuple[str, str]]] = {}
    for head, relation, tail in triples:
        step = (relation, tail) if head == entity else (relation + INVERSE, head)
        by_relation.setdefault(step[0], []).append(step)
    turns = zip_longest(*(by_relation[relation] for relation in sorted(by_relation)))
    return [step for turn in turns for step in turn if step is not None]


def _best(walks: Sequence[Steps], scores: dict[Steps, float], limit: int) -> list[RelationPath]:
    """The best paths, until there are `limit` of which none begins another."""
    kept: dict[Steps, None] = {}
    begun: set[Steps] = set()
    for walk in sorted(walks, key=lambda walk: (-scores[walk], walk)):
        if len(kept) == limit:
            break
        if walk in begun:
            continue
        for end in range(3, len(walk), 2):
            kept.pop(walk[:end], None)
            begun.add(walk[:end])
        kept[walk] = None
    return [RelationPath(walk, scores[walk]) for walk in kept]
