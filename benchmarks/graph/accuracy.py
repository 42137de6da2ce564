"""How good answers over graphs are, by attention and by scheme of positions (DepCache, section 6.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.samples import Progress, Samples
from benchmarks.graph.question import Question, answered, prompt_of
from benchmarks.quality.score import Bootstrap
from ragjax.engine import Engine

METHODS = {
    "self": ("full", False, None),
    "tree": ("full", True, None),
    "dependency/path": ("dependency", True, "path"),
    "dependency/preorder": ("dependency-preorder", True, "preorder"),
}
"""Strategy, whether paths are merged, positions."""


def accuracy(
    engine: Engine, name: str, questions: Sequence[Question], samples: Samples, progress: Progress
) -> list[dict[str, Any]]:
    """Every method on every question; a row for each method."""
    found: dict[str, list[Mapping[str, float]]] = {method: [] for method in METHODS}
    for question in questions:
        for method, (strategy, trees, _) in METHODS.items():
            ask = partial(answered, engine, question, strategy, prompt_of(engine, question, trees))
            found[method].append(samples.of(f"{name}/{question.id}/{method}", ask))
        progress.step(f"{name}: {question.id}")
    return list(accuracy_rows(name, found))


def accuracy_rows(name: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[dict[str, Any]]:
    """A row for each method, with paired intervals."""
    bootstrap = Bootstrap([name] * len(found["self"]))

    def values(method: str, metric: str) -> list[float]:
        return [sample[metric] for sample in found[method]]

    for method, (_, _, positions) in METHODS.items():
        made: dict[str, Any] = {
            "part": "accuracy",
            "set": name,
            "method": method.partition("/")[0],
            "positions": positions,
            "n": len(found[method]),
            "prompt_tokens": float(np.mean(values(method, "prompt_tokens"))),
        }
        for metric in ("accuracy", "logprob", "top1"):
            mine = values(method, metric)
            made |= bootstrap.mean(mine).columns(metric)
            made |= bootstrap.difference(mine, values("self", metric)).columns(f"{metric}_minus_self")
            if positions == "path":
                other = values("dependency/preorder", metric)
                made |= bootstrap.difference(mine, other).columns(f"{metric}_minus_preorder")
        yield made
