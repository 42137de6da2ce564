"""Pairs of tokens that attend to each other in a tree, as shares of self-attention's (DepCache 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.graph.question import Question, prompt_of
from ragjax.core import Kind, Prompt
from ragjax.core.depprompt import layout
from ragjax.engine import Engine


def work(engine: Engine, name: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Pairs that attend, over all questions of a set, by bucket of written out length."""
    counted = [pairs(prompt_of(engine, q, trees=False), prompt_of(engine, q, trees=True), q) for q in questions]
    made = []
    for low, high in ((0, 512), (512, 1024), (1024, 2**30), (0, 2**30)):
        part = [c for c in counted if low <= c["self_tokens"] < high]
        if not part:
            continue
        total = {key: float(sum(c[key] for c in part)) for key in part[0]}
        made.append(
            {
                "part": "work",
                "set": name,
                "method": "dependency",
                "positions": None,
                "n": len(part),
                "least_tokens": low,
                "prompt_tokens": total["self_tokens"] / len(part),
                "merged_tokens": total["tree_tokens"] / len(part),
                "visited_share": total["visited"] / total["self"],
                "shared_prefix": (total["self"] - total["tree"]) / total["self"],
                "non_dependent": (total["tree"] - total["visited"]) / total["self"],
                "predicted_share": total["predicted"] / total["predicted_self"],
            }
        )
    return made


def pairs(written: Prompt, merged: Prompt, question: Question) -> dict[str, int | float]:
    """Visible pairs of one question: written out, merged, merged under the mask; and what the paper's formulas say."""
    n, m = len(written), len(merged)
    own, self_ = predicted(merged, question)
    return {
        "self_tokens": n,
        "tree_tokens": m,
        "self": n * (n + 1) // 2,
        "tree": m * (m + 1) // 2,
        "visited": visited(merged),
        "predicted": own,
        "predicted_self": self_,
    }


def visited(merged: Prompt) -> int:
    """Pairs of tokens that attend to each other under the mask."""
    m, view = len(merged), layout(merged, "path")
    hidden = np.minimum(view.hide_until, m) - view.hide_from
    return m * (m + 1) // 2 - int(hidden.sum())


def predicted(merged: Prompt, question: Question) -> tuple[float, float]:
    """Section 3.2 for the context alone: N M² + N K (L² - M²) and (N K L)².

    N entities, K paths of each, L tokens of a path, M of them common to all: means over the question.
    """
    trees: dict[str, list[tuple[int, bool]]] = {}
    depth: dict[int, int] = {}
    inner = {j for s in merged.segments for j in s.depends or ()}
    for i, segment in enumerate(merged.segments):
        if segment.kind is not Kind.NODE:
            continue
        depth[i] = len(segment) + (depth[segment.depends[0]] if segment.depends else 0)
        trees.setdefault(segment.id, []).append((depth[i], i not in inner))
    n = len(trees)
    k = float(np.mean([len(subgraph.paths) for subgraph in question.subgraphs]))
    length = float(np.mean([d for nodes in trees.values() for d, leaf in nodes if leaf]))
    common = float(np.mean([nodes[0][0] if len(nodes) > 1 else nodes[0][0] - 1 for nodes in trees.values()]))
    return n * common**2 + n * k * (length**2 - common**2), (n * k * length) ** 2
