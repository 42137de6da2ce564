"""`python -m train.data`: samples for dependency-aware fine-tuning from question sets, graphs and TriviaQA files.

The paper's come from TriviaQA, with triples and answers that an LLM wrote (DepCache, section 3.3). Here the triples are
given: with each question (`kg`, `trivia`), or as a graph that questions are made about from templates (`graph`). Paths
are as retrieval makes them: simple, of a few hops, from the entities of the question. All is decided by the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ragjax.commands.flags import command_line, integer
from ragjax.core import ConfigError, RagjaxError
from ragjax.retrieval.path import INVERSE, RelationPath, Triple
from train.sample import (
    MOST_ANSWERS,
    Bad,
    Sample,
    Steps,
    answer_of,
    checked,
    lines_of,
    list_of,
    read_lines,
    read_samples,
    steps_of,
    text_of,
    write_samples,
)

MOST_ENUMERATED = 20_000
"""Walks of one length from an entity that are looked at: a hub of a large graph has more than fit into memory."""


@dataclass(frozen=True)
class Limits:
    """Of the paths of a question, all its entities together (DepCache, section 3.3: 30 paths of 2 hops an entity)."""

    paths: int = 30
    hops: int = 3


# -------------------------------------------------------------------------------------------- graph


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
    """The gold paths and others from the entities, `limits.paths` at most, shuffled; none begins another."""
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


# ------------------------------------------------------------------------------------------- makers


def from_question(value: Mapping[str, Any], limits: Limits, seed: int, number: int) -> Sample:
    """A line of a question set: question, answers, topic_entities, triples, and paths, which lead to the answer.

    Without paths, the shortest from a topic entity to an answer are taken.

    Raises:
        ValueError: saying what is missing or wrong.
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
    question names, else at all that no triple leads to.

    Raises:
        ValueError: saying what is missing or wrong.
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


# -------------------------------------------------------------------------------------------- split


def split(samples: Sequence[Sample], aside: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Put about so many samples aside; no question and no answering path is on both sides.

    An answering path is the set of triples that a gold path walks, whichever way; where gold paths are not known, all
    paths count as such. Samples that share one stay together, so a few less than `aside` may be put aside.

    Returns:
        what is left, and what was put aside, each in the order given.
    """
    group = list(range(len(samples)))

    def root(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    owner: dict[Any, int] = {}
    for i, sample in enumerate(samples):
        for key in _shared(sample):
            group[root(i)] = root(owner.setdefault(key, i))
    members: dict[int, list[int]] = {}
    for i in range(len(samples)):
        members.setdefault(root(i), []).append(i)
    groups = list(members.values())
    chosen: set[int] = set()
    for g in np.random.default_rng(seed).permutation(len(groups)):
        if len(chosen) + len(groups[g]) <= aside:
            chosen.update(groups[g])
    return [s for i, s in enumerate(samples) if i not in chosen], [s for i, s in enumerate(samples) if i in chosen]


def apart(samples: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """The samples that share no question and no answering path, as `split` has them, with any of the others."""
    taken = {key for other in others for key in _shared(other)}
    return [sample for sample in samples if taken.isdisjoint(_shared(sample))]


def _shared(sample: Sample) -> list[str | frozenset[Triple]]:
    """What two samples must not have in common to be on two sides."""
    asked = " ".join(sample.question.lower().split())
    return [asked, *(frozenset(RelationPath(steps).triples) for steps in sample.gold or sample.paths)]


# ------------------------------------------------------------------------------------------ command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; an error of ours is one line, and exit status 1."""
    try:
        options = _options(argv)
        aside_out = _aside_out(options)
        samples = options.make(options)
        if options.apart:
            samples = apart(samples, read_samples(options.apart))
        if not samples:
            raise ConfigError("no sample could be made")
        aside: list[Sample] = []
        if options.aside:
            samples, aside = split(samples, options.aside, options.seed)
            if not samples:
                raise ConfigError(f"--aside {options.aside} puts all {len(aside)} samples aside; put fewer there")
            write_samples(aside, aside_out)
        write_samples(samples, options.out)
    except RagjaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(samples)} samples written to {options.out}, {len(aside)} put aside")
    return 0


def _aside_out(options: argparse.Namespace) -> Path:
    """Where samples are put aside."""
    if options.aside_out is None:
        out: Path = options.out.with_suffix(".aside.jsonl")
        return out
    if not options.aside:
        raise ConfigError("--aside-out has no effect without --aside: say how many to put aside, or leave it out")
    if options.aside_out.resolve() == options.out.resolve():
        raise ConfigError(f"--out and --aside-out are both {options.out}: give two files")
    return Path(options.aside_out)


def _from_kg(options: argparse.Namespace) -> list[Sample]:
    limits = Limits(options.paths, options.hops)
    numbers = iter(range(10**9))

    def parse(value: Mapping[str, Any]) -> Sample:
        return from_question(value, limits, options.seed, next(numbers))

    return _named(read_lines(options.files, parse, options.max_bad))


def _from_graph(options: argparse.Namespace) -> list[Sample]:
    bad = Bad(options.max_bad)
    triples = [triple for file in options.files for triple in _read_triples(Path(file), bad)]
    return from_graph(triples, options.count, Limits(options.paths, options.hops), options.seed)


def _read_triples(file: Path, bad: Bad) -> Iterator[Triple]:
    """Head, relation and tail, separated by tabs. Raises ConfigError naming the line that is one wrong too many."""
    for number, line in enumerate(lines_of(file), 1):
        if not line.strip():
            continue
        try:
            yield triple_of([part.strip() for part in line.split("\t")])
        except ValueError as error:
            bad.skip(f"{file}, line {number}", error)


def _from_trivia(options: argparse.Namespace) -> list[Sample]:
    given = read_lines(options.triples, _facts, options.max_bad)
    facts = {name: triples for _, (name, triples, _) in given}
    answers = {name: answer for _, (name, _, answer) in given if answer}
    limits = Limits(options.paths, options.hops)
    samples, bad = [], Bad(options.max_bad)
    for file in map(Path, options.files):
        for number, value in enumerate(_entries(file), 1):
            try:
                samples.append(from_trivia(value, facts, answers, limits, options.seed))
            except ValueError as error:
                bad.skip(f"{file}, entry {number}", error)
    return samples


def _facts(value: Mapping[str, Any]) -> tuple[str, list[Triple], str]:
    triples = [triple_of(triple) for triple in list_of(value, "triples")]
    return text_of(value, "id"), triples, text_of(value, "answer") if "answer" in value else ""


def _entries(file: Path) -> list[Mapping[str, Any]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8-sig"))["Data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a TriviaQA file, an object with Data: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: not a TriviaQA file: its Data must be a list")
    return [entry if isinstance(entry, Mapping) else {} for entry in entries]


def _from_samples(options: argparse.Namespace) -> list[Sample]:
    return read_samples(options.files, options.max_bad)


def _named(found: Sequence[tuple[str, Sample]]) -> list[Sample]:
    return [sample if sample.id else replace(sample, id=place) for place, sample in found]


SOURCES: Mapping[str, tuple[Callable[[argparse.Namespace], list[Sample]], str]] = {
    "kg": (_from_kg, "question sets: JSON lines of question, answers, topic_entities, triples, paths"),
    "graph": (_from_graph, "a graph: head, relation and tail by tabs; questions are made from templates"),
    "trivia": (_from_trivia, "TriviaQA files, with --triples"),
    "samples": (_from_samples, "samples: to be joined and split"),
}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("train.data", "Samples for dependency-aware fine-tuning.")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind, (make, text) in SOURCES.items():
        flag = kinds.add_parser(kind, help=text, description=text, allow_abbrev=False).add_argument
        flag("files", nargs="+", metavar="FILE")
        flag("--out", type=Path, required=True, metavar="FILE", help="samples, JSON lines")
        flag("--aside", type=integer(0), default=0, metavar="N", help="put so many aside that share no answering path")
        flag("--aside-out", type=Path, metavar="FILE", help="where to (default: --out with .aside.jsonl)")
        flag("--apart", nargs="+", metavar="FILE", help="leave out what shares an answering path with these samples")
        flag("--paths", type=integer(1), default=30, help="of a question, at most (default: 30)")
        flag("--hops", type=integer(1, 4), default=3, help="of a path, at most (default: 3)")
        flag("--seed", type=integer(0), default=0)
        flag("--max-bad", type=integer(0), default=0, help="lines of each kind of file that may be wrong (default: 0)")
        if kind == "graph":
            flag("--count", type=integer(1), default=1000, help="questions to make (default: 1000)")
        if kind == "trivia":
            flag("--triples", nargs="+", required=True, metavar="FILE", help="JSON lines of id, triples, answer")
        kinds.choices[kind].set_defaults(make=make)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
