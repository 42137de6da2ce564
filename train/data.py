"""`python -m train.data`: samples for dependency-aware fine-tuning from question sets, graphs and TriviaQA files.

The paper's come from TriviaQA, with triples and answers that an LLM wrote (DepCache, section 3.3). Here the triples are
given: with each question (`kg`, `trivia`), or as a graph that questions are made about from templates (`graph`). Paths
are as retrieval makes them: simple, of a few hops, from the entities of the question. All is decided by the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ragjax.commands.flags import Parser, exit_code, integer
from ragjax.core import ConfigError, EngineOptions
from ragjax.engine import Engine
from ragjax.retrieval.triples import Triple
from train.answer import answered
from train.maker import from_graph, from_question, from_trivia, triple_of
from train.reading import Question, Shape, from_questions, without
from train.sample import Bad, Sample, lines_of, list_of, named, normal, read_lines, read_samples, text_of, write_samples
from train.split import apart, split
from train.walk import Limits

ANSWER_TOKENS = 24
"""Of an answer by a model, at most."""

Source = Callable[[argparse.Namespace], tuple[list[Sample], list[Sample]]]
"""Makes samples, and those that are put aside."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("python -m train.data", lambda: _run(argv), 1)


def _run(argv: Sequence[str] | None) -> int:
    options = _options(argv)
    aside_out = _aside_out(options)
    samples, aside = options.make(options)
    if options.aside:
        write_samples(aside, aside_out)
    write_samples(samples, options.out)
    print(f"{len(samples)} samples written to {options.out}, {len(aside)} put aside")
    return 0


def _divided(make: Callable[[argparse.Namespace], list[Sample]]) -> Source:
    """A source whose samples are all made, and then put aside."""

    def source(options: argparse.Namespace) -> tuple[list[Sample], list[Sample]]:
        samples = _kept(make(options), options)
        if not options.aside:
            return samples, []
        samples, aside = split(samples, options.aside, options.seed)
        if not samples:
            raise ConfigError(f"--aside {options.aside} puts all {len(aside)} samples aside; put fewer there")
        return samples, aside

    return source


def _kept(samples: list[Sample], options: argparse.Namespace) -> list[Sample]:
    """Leave out samples that share anything with those of `--apart`."""
    kept = apart(samples, read_samples(options.apart)) if options.apart else samples
    if not kept:
        raise ConfigError("no sample could be made")
    return kept


def _aside_out(options: argparse.Namespace) -> Path:
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

    return named(read_lines(options.files, parse, options.max_bad))


def _from_graph(options: argparse.Namespace) -> list[Sample]:
    bad = Bad(options.max_bad)
    triples = [triple for file in options.files for triple in _read_triples(Path(file), bad)]
    return from_graph(triples, options.count, Limits(options.paths, options.hops), options.seed)


def _read_triples(file: Path, bad: Bad) -> Iterator[Triple]:
    """Head, relation and tail, separated by tabs. Raises ConfigError naming the line that is one wrong too many."""
    for number, line in lines_of(file):
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


def _from_text(options: argparse.Namespace) -> tuple[list[Sample], list[Sample]]:
    """Questions are put aside, not samples: a question comes back in many samples."""
    if options.answer_tokens is not None and options.answers is None:
        raise ConfigError("--answer-tokens is of the answers of a model: name it by --answers, or leave it out")
    found = read_lines(options.files, Question.from_json, options.max_bad)
    if not found:
        raise ConfigError(f"no questions in {', '.join(options.files)}")
    shape = Shape(options.passages, options.asked)
    order = np.random.default_rng([options.seed, 4]).permutation(len(found))
    questions, held = [found[i][1] for i in order], options.aside * shape.own
    if held >= len(questions):
        raise ConfigError(f"--aside {options.aside} takes {held} of {len(questions)} questions; put fewer there")
    aside = _kept(from_questions(questions[:held], shape, options.aside, options.seed), options) if held else []
    shown = {passage for sample in aside for passage in sample.passages}
    rest = without(questions[held:], questions[:held], shown)
    if not rest:
        raise ConfigError(f"all questions share passages with the {options.aside} samples put aside; put fewer there")
    taken = {normal(asked.question) for sample in aside for asked in sample.asked}
    samples = _kept(from_questions(rest, shape, options.count, options.seed, taken), options)
    return (samples, aside) if options.answers is None else _answered(options, samples, aside)


def _answered(
    options: argparse.Namespace, samples: Sequence[Sample], aside: Sequence[Sample]
) -> tuple[list[Sample], list[Sample]]:
    """The same with answers of a model."""
    chosen = EngineOptions(model=options.answers, device_cache_gb=0.5, compile=False)
    with Engine.load(chosen) as engine, tqdm(total=len(samples) + len(aside), desc="answers", unit="sample") as bar:
        most = options.answer_tokens or ANSWER_TOKENS
        return answered(engine, samples, most, bar.update), answered(engine, aside, most, bar.update)


def _from_samples(options: argparse.Namespace) -> list[Sample]:
    return read_samples(options.files, options.max_bad)


SOURCES: Mapping[str, tuple[Source, str]] = {
    "kg": (_divided(_from_kg), "question sets: JSON lines of question, answers, topic_entities, triples, paths"),
    "graph": (_divided(_from_graph), "a graph: head, relation and tail by tabs; questions are made from templates"),
    "trivia": (_divided(_from_trivia), "TriviaQA files, with --triples"),
    "text": (_from_text, "question sets with passages: JSON lines of question, answers, passages"),
    "samples": (_divided(_from_samples), "samples: to be joined and split"),
}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m train.data", "Samples for dependency-aware fine-tuning.")
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind, (make, text) in SOURCES.items():
        flag = kinds.add_parser(kind, help=text, description=text, allow_abbrev=False).add_argument
        flag("files", nargs="+", metavar="FILE")
        flag("--out", type=Path, required=True, metavar="FILE", help="samples, JSON lines")
        flag(
            "--aside", type=integer(0), default=0, metavar="N", help="put so many aside that share no path or question"
        )
        flag("--aside-out", type=Path, metavar="FILE", help="where to (default: --out with .aside.jsonl)")
        flag("--apart", nargs="+", metavar="FILE", help="leave out what shares an answering path with these samples")
        if kind in ("kg", "graph", "trivia"):
            flag("--paths", type=integer(1), default=30, help="of a question, at most if no more answer it (30)")
            flag("--hops", type=integer(1, 4), default=3, help="of a path, at most (default: 3)")
        flag("--seed", type=integer(0), default=0)
        flag("--max-bad", type=integer(0), default=0, help="lines of each kind of file that may be wrong (default: 0)")
        if kind in ("graph", "text"):
            flag("--count", type=integer(1), default=1000, help="samples to make (default: 1000)")
        if kind == "text":
            flag("--passages", type=integer(2), default=10, help="of a sample, at most (default: 10)")
            flag("--asked", type=integer(2), default=8, help="questions of a sample (default: 8)")
            flag("--answers", metavar="MODEL", help="answers of this model, instead of written ones")
            flag("--answer-tokens", type=integer(1), metavar="N", help=f"of such an answer, at most ({ANSWER_TOKENS})")
        if kind == "trivia":
            flag("--triples", nargs="+", required=True, metavar="FILE", help="JSON lines of id, triples, answer")
        kinds.choices[kind].set_defaults(make=make)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
