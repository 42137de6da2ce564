"""Time to first token of prompts over graphs by their length (DepCache, section 6.3)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.graph.question import Question, prompt_of
from benchmarks.graph.work import visited
from ragjax.core import Answer, RequestError
from ragjax.engine import Engine
from ragjax.retrieval.path import Subgraph

LENGTHS = (1024, 2048, 4096, 8192)


def lengthened(engine: Engine, questions: Sequence[Question], tokens: int, seed: int) -> Question | None:
    """A question whose paths and those of others take about so many tokens written out; None if there are too few."""
    order = np.random.default_rng(seed).permutation(len(questions))
    first = questions[order[0]]
    subgraphs: dict[str, Subgraph] = {}
    for i in order:
        for subgraph in questions[i].subgraphs:
            subgraphs.setdefault(subgraph.entity, subgraph)
        made = Question(first.id, first.text, first.answers, tuple(subgraphs.values()))
        if len(prompt_of(engine, made, trees=False)) >= tokens:
            return _cut(engine, made, tokens)
    return None


def _cut(engine: Engine, question: Question, tokens: int) -> Question:
    """Its paths, of the last entity as many as fit."""
    *before, last = question.subgraphs
    for count in range(len(last.paths), -1, -1):
        kept = (*before, *((Subgraph(last.entity, last.paths[:count]),) if count else ()))
        made = Question(question.id, question.text, question.answers, kept)
        if len(prompt_of(engine, made, trees=False)) <= tokens:
            return made
    return made


def length(engine: Engine, name: str, questions: Sequence[Question], runs: int) -> list[dict[str, Any]]:
    """Time to first token by prompt length; methods take turns within a run."""
    made = []
    for tokens in (n for n in LENGTHS if n <= engine.context_length - 8):
        found: dict[str, list[tuple[float, Answer]]] = {}
        shares: list[float] = []
        for run in range(runs + 1):
            question = lengthened(engine, questions, tokens, run)
            if question is None:
                break
            written, merged = (prompt_of(engine, question, trees) for trees in (False, True))
            try:
                answers = list(first_tokens(engine, question))
            except RequestError as error:  # paths of too many entities, each a passage of its own when written out
                print(f"{name}: no {tokens} tokens: {error}", file=sys.stderr)
                found.clear()
                break
            shares.append(visited(merged) / (len(written) * (len(written) + 1) // 2))
            for method, answer in answers if run else ():  # what runs first pays for what is lazy
                found.setdefault(method, []).append((answer.timings.ttft, answer))
        full = np.array([t for t, _ in found.get("self", ())])
        for method, timed in found.items():
            mine = np.array([t for t, _ in timed])
            made.append(
                {
                    "part": "length",
                    "set": name,
                    "method": method.partition("/")[0],
                    "positions": (method.partition("/")[2] or None),
                    "n": len(timed),
                    "written_tokens": tokens,
                    "visited_share": float(np.mean(shares)),
                    "prompt_tokens": float(np.mean([a.prompt_tokens for _, a in timed])),
                    "hit_rate": float(np.mean([a.cached_tokens / a.prompt_tokens for _, a in timed])),
                    "ttft_ms": float(np.median(mine)),
                    "faster": float(np.median(full) / np.median(mine)),
                }
            )
    return made


def first_tokens(engine: Engine, question: Question) -> Iterator[tuple[str, Answer]]:
    """One question by every method, nothing known and everything known."""
    written, merged = (prompt_of(engine, question, trees) for trees in (False, True))
    warm = {"self-prefix": ("prefix", written)}
    for positions in ("path", "preorder"):
        strategy = "dependency" if positions == "path" else "dependency-preorder"
        warm[f"dependency-cached/{positions}"] = (strategy, merged)
    engine.clear_cache()
    yield "self", engine.answer_prompt(written, strategy="full", max_tokens=1)
    for method, (strategy, prompt) in warm.items():
        engine.clear_cache()
        cold = engine.answer_prompt(prompt, strategy=strategy, max_tokens=1)
        if strategy != "prefix":
            yield method.replace("-cached", ""), cold
        yield method, engine.answer_prompt(prompt, strategy=strategy, max_tokens=1)
