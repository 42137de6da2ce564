"""Samples from question sets, from a graph by templates, and from TriviaQA with triples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from ragjax.retrieval.triples import INVERSE, RelationPath, Triple
from train.sample import MOST_ANSWERS, Sample, Steps, answer_of, checked, list_of, steps_of, text_of
from train.walk import Graph, Limits, around


def from_question(value: Mapping[str, Any], limits: Limits, seed: int, number: int) -> Sample:
    """A line of a question set: question, answers, topic_entities, triples, and paths, which lead to the answer.

    Without paths, the shortest from a topic entity to an answer are taken. ValueError: what is missing or wrong.
    """
    answers = [text for text in list_of(value, "answers") if isinstance(text, str)]
    triples = [triple_of(triple) for triple in list_of(value, "triples")]
    entities = [str(entity) for entity in list_of(value, "topic_entities")]
    gold = tuple(dict.fromkeys(_unlooped(steps_of(path)) for path in list_of(value, "paths")))
    if not gold:
        gold = _leading(Graph(triples), entities, answers, limits)
    gold = tuple(checked(steps) for steps in gold if len(steps) > 1)
    gold = tuple(sorted(gold, key=lambda s: s[-1] not in answers[:MOST_ANSWERS]))
    if not gold:
        raise ValueError("no path leads to an answer")
    gold = gold[: limits.paths]
    triples += [triple for steps in gold for triple in RelationPath(steps).triples]
    paths = around(Graph(triples), [*(steps[0] for steps in gold), *entities], gold, limits, [seed, number])
    return Sample(str(value.get("id", "")), text_of(value, "question"), answer_of(value), paths, gold)


def _unlooped(steps: Steps) -> Steps:
    """The path without what it walks between coming to an entity and coming there again."""
    kept: list[str] = []
    for i in range(0, len(steps), 2):
        if steps[i] in kept[::2]:
            kept = kept[: 2 * kept[::2].index(steps[i]) + 1]
        else:
            kept += steps[max(0, i - 1) : i + 1]
    return tuple(kept)


def _leading(graph: Graph, roots: Sequence[str], ends: Iterable[str], limits: Limits) -> tuple[Steps, ...]:
    """The shortest paths from the roots to one of these ends, a few."""
    wanted = {end.lower() for end in ends}
    found = (steps for root in roots for steps in graph.walks(root, limits.hops) if steps[-1].lower() in wanted)
    return tuple(islice(found, MOST_ANSWERS))


def triple_of(value: Any) -> Triple:
    """A triple: a list of three texts, or an object of head, relation and tail. Raises ValueError if it is neither."""
    parts = [value.get(name) for name in Triple._fields] if isinstance(value, Mapping) else value
    named = isinstance(parts, list | tuple) and all(isinstance(x, str) and x.strip() for x in parts)
    if not named or len(parts) != 3:
        raise ValueError(f"a triple must be head, relation and tail, none of them blank, not {value!r}")
    return Triple(*parts)


ONE_HOP = ("What is the {0} of {e}?", "{e}: {0}?", "Tell me the {0} of {e}.")
ONE_HOP_VERB = ("{e} {0} what?", "What is it that {e} {0}?", "Complete: {e} {0} …")
TWO_HOPS = ("What is the {1} of the {0} of {e}?", "Take the {0} of {e}. What is its {1}?")
TWO_HOPS_VERB = ("{e} {0} something. What of it: {1}?", "Follow {e} by “{0}”, then by “{1}”. Where does it lead?")
VERBS = ("is", "has", "was", "in", "lies", "born", "plays", "written", "directed", "starred", "located", "borders")
"""How relations begin that read as verbs or participles rather than as nouns."""


def from_graph(triples: Sequence[Triple], count: int, limits: Limits, seed: int) -> list[Sample]:
    """Questions of one and two hops, half of each where the graph allows, by templates from the relations' names.

    A question has all entities that its relations lead to as answers, and no more than `MOST_ANSWERS`.
    """
    graph = Graph(triples)
    names = [entity for entity in graph.edges if entity.strip()]
    random = np.random.default_rng([seed, 1])
    samples: dict[tuple[str, tuple[str, ...]], Sample] = {}
    for attempt in range(20 * count):
        if len(samples) == count or not names:
            break
        entity = names[int(random.integers(len(names)))]
        relations = _relations(graph, entity, 1 + attempt % 2, random)
        gold = () if relations is None else tuple(_followed(graph, entity, relations))
        if relations is None or not 0 < len(gold) <= MOST_ANSWERS or (entity, relations) in samples:
            continue
        answers = sorted({steps[-1] for steps in gold})
        question = _question(entity, relations, random)
        paths = around(graph, [entity], gold, limits, [seed, attempt])
        samples[entity, relations] = Sample(f"graph:{attempt}", question, ", ".join(answers), paths, gold)
    return list(samples.values())


def _relations(graph: Graph, entity: str, hops: int, random: np.random.Generator) -> tuple[str, ...] | None:
    """Relations of a random walk, in their own direction."""
    found, at, seen = [], entity, {entity}
    for _ in range(hops):
        edges = [(r, e) for r, e in graph.edges.get(at, ()) if not r.endswith(INVERSE) and e not in seen]
        if not edges:
            return None
        relation, at = edges[int(random.integers(len(edges)))]
        found.append(relation)
        seen.add(at)
    return tuple(found)


def _followed(graph: Graph, entity: str, relations: Sequence[str]) -> Iterator[Steps]:
    """All simple paths along these relations."""
    paths: list[Steps] = [(entity,)]
    for relation in relations:
        paths = [
            (*steps, r, e)
            for steps in paths
            for r, e in graph.edges.get(steps[-1], ())
            if r == relation and e not in steps[::2]
        ]
    yield from paths


def _question(entity: str, relations: Sequence[str], random: np.random.Generator) -> str:
    verbal = any(relation.split()[0].lower() in VERBS for relation in relations if relation.split())
    kinds = (ONE_HOP_VERB if verbal else ONE_HOP), (TWO_HOPS_VERB if verbal else TWO_HOPS)
    templates = kinds[len(relations) - 1]
    words = (relation.replace("_", " ") for relation in relations)
    return templates[int(random.integers(len(templates)))].format(*words, e=entity)


def from_trivia(
    value: Mapping[str, Any],
    facts: Mapping[str, Sequence[Triple]],
    answers: Mapping[str, str],
    limits: Limits,
    seed: int,
) -> Sample:
    """An entry of a TriviaQA file (arXiv 1705.03551), with the triples given for its QuestionId.

    answers: sentences to be learned; without one, the entry's own value. Paths begin at the triples' entities that the
    question names, else at all that no triple leads to. ValueError: what is missing or wrong.
    """
    name, question = text_of(value, "QuestionId"), text_of(value, "Question")
    if not facts.get(name):
        raise ValueError(f"no triples are given for {name}")
    known = value.get("Answer")
    aliases = [known.get("Value"), *list_of(known, "Aliases")] if isinstance(known, Mapping) else []
    answer = answers.get(name) or next((a for a in aliases if isinstance(a, str) and a.strip()), None)
    if answer is None:
        raise ValueError(f"{name} has no Answer.Value, and no answer is given for it")
    triples = facts[name]
    entities = list(dict.fromkeys(e for triple in triples for e in (triple.head, triple.tail)))
    named = [entity for entity in entities if entity.lower() in question.lower()]
    roots = named or [e for e in entities if e not in {triple.tail for triple in triples}] or entities[:1]
    graph = Graph(triples)
    gold = _leading(graph, roots, [text for text in (answer, *aliases) if isinstance(text, str)], limits)
    paths = around(graph, roots, gold, limits, [seed, *name.encode()])
    return Sample(name, question, answer.strip(), paths, gold)
