"""What dependency-aware fine-tuning is worth: questions that training never saw, before it and after (DepCache, 6.5).

DIR/kg/SET/questions.jsonl holds questions; of these the ones are asked whose ids stand in the files of samples that
`python -m train.data kg --aside` put aside. --tuned is a model that `python -m train.depft` made of --model, --control
one that it made of the same samples with `--attention self`.

Rows mirror DepCache's Figure 14: `self` is causal attention over paths that are written out, `dependency` over their
trees under `path` positions. `repositioned` is no where each branch is left at the positions of an earlier request, as
reuse that turns no key would have it: behind so many of its tree's tokens as chance has it. `accuracy` is whether one
of the answers occurs in what is generated, `f1` the overlap in words with all of them joined, `logprob` the mean over
the tokens of the first answer. Intervals are 95% paired bootstrap intervals over questions; `_minus_control` is the
paired difference from the tuned `self`, `_minus_self` from the untuned.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress, Samples, weights_of
from benchmarks.graph.part import Uncached
from benchmarks.graph.plot import FIGURES
from benchmarks.graph.question import LIMITS, QUICK_LIMIT, SETS, Question, answered, opened, prompt_of, questions_of
from benchmarks.quality.score import column, compared
from ragjax.commands.flags import integer
from ragjax.core import ConfigError, Kind, Prompt
from ragjax.core.depprompt import begins_of
from ragjax.engine import Engine
from ragjax.reuse.base import Strategy
from ragjax.reuse.dependency import Scene
from train.sample import read_samples

MARGIN = 0.04  # of accuracy: what is not worse by more is not inferior
METRICS = ("accuracy", "f1", "logprob")
COLUMNS = (
    "set", "method", "tuned", "repositioned", "n", "prompt_tokens", "accuracy", "accuracy_lo", "accuracy_hi", "f1",
    "logprob", "accuracy_minus_control", "accuracy_minus_control_lo", "accuracy_minus_control_hi",
)  # fmt: skip


class Misplaced(Uncached):
    """Dependency attention over branches that stand where they stood in earlier requests, each in another one."""

    def _scene(self, prompt: Prompt) -> Scene:
        return replace(super()._scene(prompt), begins=tuple(misplaced(prompt)))


def misplaced(prompt: Prompt) -> Iterator[int]:
    """Each segment's first position: a tree's branch stands behind 0 or more tokens that are not its ancestors.

    Their number is uniform from what its parent has to what is in the tree besides its path.
    """
    random = np.random.default_rng(len(prompt))
    sizes: dict[str, int] = {}
    for segment in prompt.segments:
        sizes[segment.id] = sizes.get(segment.id, 0) + len(segment)
    gaps: dict[int, int] = {}
    depths: dict[int, int] = {}
    for i, (segment, begin) in enumerate(zip(prompt.segments, begins_of(prompt, "path"), strict=True)):
        if segment.kind is not Kind.NODE:
            yield begin
            continue
        parent = next((j for j in segment.depends or () if j in gaps), None)
        least, above = (0, 0) if parent is None else (gaps[parent], depths[parent])
        depths[i] = above + len(segment)
        gaps[i] = int(random.integers(least, max(least, sizes[segment.id] - depths[i]) + 1))
        yield begin + gaps[i]


@dataclass(frozen=True)
class Method:
    """A row of the figure. model: which of the three; strategy, and whether paths are merged."""

    name: str
    model: str
    strategy: str | Strategy
    trees: bool
    repositioned: bool | None = None


METHODS = (
    Method("self", "model", "full", False), Method("dependency", "model", "dependency", True, True),
    Method("self", "control", "full", False), Method("dependency", "tuned", "dependency", True, True),
    Method("dependency", "tuned", Misplaced(), True, False),
)  # fmt: skip
BASE, CONTROL = METHODS[0], METHODS[2]


def measure(
    chosen: Namespace, sets: Mapping[str, Sequence[Question]], samples: Samples
) -> dict[str, dict[Method, list[dict[str, Any]]]]:
    found: dict[str, dict[Method, list[dict[str, Any]]]] = {name: {} for name in sets}
    progress = Progress(3 * sum(map(len, sets.values())))
    for model in ("model", "tuned", "control"):
        methods = [m for m in METHODS if m.model == model]
        with opened(getattr(chosen, model), chosen.dtype) as engine:
            for name, questions in sets.items():
                for method in methods:
                    found[name][method] = []
                for question in questions:
                    ask(engine, name, question, methods, samples, found[name])
                    progress.step(f"{model}: {question.id}")
    return found


def ask(
    engine: Engine,
    name: str,
    question: Question,
    methods: Sequence[Method],
    samples: Samples,
    found: Mapping[Method, list[dict[str, Any]]],
) -> None:
    for method in methods:
        key = f"{name}/{question.id}/{method.model}/{method.name}/{method.repositioned}"
        prompt = prompt_of(engine, question, method.trees)
        found[method].append(samples.of(key, partial(answered, engine, question, method.strategy, prompt)))


def rows(found: Mapping[str, Mapping[Method, Sequence[Mapping[str, Any]]]]) -> Iterator[dict[str, Any]]:
    for name in [*found, "pooled"]:
        parts = [n for n in found if name in (n, "pooled")]
        groups = [n for n in parts for _ in found[n][BASE]]
        for method in METHODS:
            mine, base, control = ([s for n in parts for s in found[n][m]] for m in (method, BASE, CONTROL))
            yield {
                "part": "finetuning", "set": name, "method": method.name,
                "tuned": "yes" if method.model != "model" else "no",
                "repositioned": {None: None, True: "yes", False: "no"}[method.repositioned], "n": len(mine),
                "prompt_tokens": float(np.mean(column(mine, "prompt_tokens"))),
                **compared(mine, METRICS, {"minus_self": base, "minus_control": control}, groups),
            }  # fmt: skip


def verdict(made: Sequence[Mapping[str, Any]]) -> str:
    """Whether tuned dependency attention is as good as tuned self-attention, over all sets."""
    row = next(r for r in made if r["set"] == "pooled" and r["tuned"] == "yes" and r["repositioned"] == "yes")
    low = row["accuracy_minus_control_lo"]
    word = "is not inferior to" if low >= -MARGIN else "may be inferior to"
    return (
        f"tuned dependency attention {word} tuned self-attention (margin {MARGIN}): "
        f"{row['accuracy_minus_control']:+.3f} [{low:+.3f}, {row['accuracy_minus_control_hi']:+.3f}]"
    )


def options(flags: Parser) -> None:
    flags.add("--data", type=Path, required=True, metavar="DIR", help="a folder with kg/SET/questions.jsonl")
    flags.add("--aside", required=True, nargs="+", metavar="FILE", help="samples that were put aside, for their ids")
    flags.add("--tuned", required=True, metavar="DIR", help="the model that was fine-tuned under dependency attention")
    flags.add("--control", required=True, metavar="DIR", help="the one that was fine-tuned under self-attention")
    flags.add("--sets", type=report.listed, default=SETS, metavar="A,B", help="sets of the folder")
    flags.add("--paths", type=integer(1), default=LIMITS.paths, metavar="N", help="of a question, at most")


def run(chosen: Namespace, samples: Samples) -> list[dict[str, Any]]:
    aside = frozenset(sample.id for sample in read_samples(chosen.aside))
    limit = QUICK_LIMIT if chosen.quick else None
    sets = {
        name: questions_of(chosen.data, name, limit, replace(LIMITS, paths=chosen.paths), aside) for name in chosen.sets
    }
    empty = [name for name, questions in sets.items() if not questions]
    if empty:
        raise ConfigError(f"no question of {empty[0]} was put aside in {', '.join(chosen.aside)}")
    return list(rows(measure(chosen, sets, samples)))


def settings_of(chosen: Namespace) -> dict[str, Any]:
    models = {name: weights_of(getattr(chosen, name)) for name in ("model", "tuned", "control")}
    return models | {name: str(getattr(chosen, name)) for name in ("dtype", "data", "paths")}


def measured(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    return run(chosen, session.samples(settings_of(chosen)))


BENCHMARK = Benchmark(
    "finetuning", __doc__, COLUMNS, measured, options, model=True, figures=FIGURES,
    show=lambda made, _: print("\n" + verdict(made)),
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
