"""A stream of requests over graphs, with a device cache of a fifth of the data (DepCache, section 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common.samples import Progress
from benchmarks.graph.question import Question, opened, prompt_of
from ragjax.core import Kind
from ragjax.engine.build import PAGE_SIZE
from ragjax.reuse.dependency import Dependency

ENTITIES = 10
CAPACITY = 0.2


class Uncached(Dependency):
    """Dependency attention that finds and keeps no branch."""

    def _match(self, *_: Any) -> dict[int, Any]:
        return {}

    def _admit(self, *_: Any) -> None:
        pass


def requests(questions: Sequence[Question], count: int, seed: int = 0) -> list[Question]:
    """Questions of ten entities each, entities drawn after Zipf without repetition (DepCache, section 6.1)."""
    entities = list({s.entity: s for q in questions for s in q.subgraphs}.values())
    random = np.random.default_rng(seed)
    weight = 1 / np.arange(1, len(entities) + 1)
    order = random.permutation(len(entities))
    drawn = []
    for number in range(count):
        chosen = random.choice(len(entities), min(ENTITIES, len(entities)), replace=False, p=weight / weight.sum())
        first = questions[number % len(questions)]
        subgraphs = tuple(entities[order[i]] for i in chosen)
        drawn.append(Question(f"{number}", first.text, first.answers, subgraphs))
    return drawn


def capacity(everything: int, longest: int) -> tuple[int, int]:
    """(tokens of the device cache, context) where the entities take `everything` and the longest prompt `longest`."""
    context = longest + PAGE_SIZE
    return max(int(CAPACITY * everything), context + PAGE_SIZE) + 2 * PAGE_SIZE, context  # one page holds nothing


def workload(model: str, dtype: str, name: str, asked: Sequence[Question], progress: Progress) -> list[dict[str, Any]]:
    """Hit rate and time to first token over a stream of requests, with a cache of a fifth of the data."""
    made: dict[str, list[tuple[float, float]]] = {"dependency": [], "dependency-cached": []}
    with opened(model, dtype) as engine:
        whole = {s.entity: s for q in asked for s in q.subgraphs}
        prompts = (prompt_of(engine, Question("", "?", ("",), (s,)), trees=True) for s in whole.values())
        everything = sum(len(s) for prompt in prompts for s in prompt.segments if s.kind is Kind.NODE)
        longest = max(len(prompt_of(engine, q, trees=True)) for q in asked)
        per_token = engine._runner.config.kv_bytes_per_token(2)
    tokens, context = capacity(everything, longest)
    with opened(model, dtype, tokens * per_token / 2**30, context) as engine:
        pool = engine._cache.pool
        for question in asked:
            prompt = prompt_of(engine, question, trees=True)
            cached = engine.answer_prompt(prompt, strategy="dependency", max_tokens=1)
            alone = engine.answer_prompt(prompt, strategy=Uncached(), max_tokens=1)
            for method, answer in (("dependency-cached", cached), ("dependency", alone)):
                made[method].append((answer.timings.ttft, answer.cached_tokens / answer.prompt_tokens))
            progress.step(f"{name}: request {question.id}")
    alone_ms = np.array([t for t, _ in made["dependency"]])
    return [
        {
            "part": "workload",
            "set": name,
            "method": method,
            "positions": "path",
            "n": len(samples),
            "prompt_tokens": float(longest),
            "capacity_tokens": float(pool.capacity * pool.page_size),
            "capacity_share": pool.capacity * pool.page_size / everything,
            "hit_rate": float(np.mean([hit for _, hit in samples])),
            "ttft_ms": float(np.median([t for t, _ in samples])),
            "faster": float(np.median(alone_ms) / np.median([t for t, _ in samples])),
        }
        for method, samples in made.items()
    ]
