"""Pairs of tokens that attend to each other in a tree, as shares of self-attention's (DepCache 3.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.baseline.strategy.streaming import Streaming
from benchmarks.common.samples import Progress, Samples
from benchmarks.graph.communities import Communities
from benchmarks.graph.question import Question, answered, opened, prompt_of
from benchmarks.quality.score import column, compared
from ragjax.core import Answer, Kind, Prompt, RequestError
from ragjax.core.depprompt import layout
from ragjax.engine import Engine
from ragjax.engine.build import PAGE_SIZE
from ragjax.retrieval.triples import Subgraph
from ragjax.reuse.base import Strategy
from ragjax.reuse.dependency import Dependency


def work(engine: Engine, name: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Pairs that attend, over all questions of a set, by bucket of written out length."""
    counted = [pairs(prompt_of(engine, q, trees=False), prompt_of(engine, q, trees=True), q) for q in questions]
    made = []
    for low, high in ((0, 512), (512, 1024), (1024, 2**30), (0, 2**30)):
        part = [c for c in counted if low <= c["self_tokens"] < high]
        if not part:
            continue
        total = {key: float(sum(c[key] for c in part)) for key in part[0]}
        made.append({
            "part": "work", "set": name, "method": "dependency", "positions": None, "n": len(part), "least_tokens": low,
            "prompt_tokens": total["self_tokens"] / len(part), "merged_tokens": total["tree_tokens"] / len(part),
            "visited_share": total["visited"] / total["self"],
            "shared_prefix": (total["self"] - total["tree"]) / total["self"],
            "non_dependent": (total["tree"] - total["visited"]) / total["self"],
            "predicted_share": total["predicted"] / total["predicted_self"],
        })  # fmt: skip
    return made


def pairs(written: Prompt, merged: Prompt, question: Question) -> dict[str, int | float]:
    """Visible pairs of one question: written out, merged, merged under the mask; and what the paper's formulas say."""
    n, m = len(written), len(merged)
    own, self_ = predicted(merged, question)
    return {
        "self_tokens": n, "tree_tokens": m, "self": n * (n + 1) // 2, "tree": m * (m + 1) // 2,
        "visited": visited(merged), "predicted": own, "predicted_self": self_,
    }  # fmt: skip


def visited(merged: Prompt) -> int:
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


METHODS: Mapping[str, tuple[str | Strategy, bool | None, str | None]] = {
    "self": ("full", False, None), "streaming": (Streaming(), False, None), "communities": ("full", None, None),
    "tree": ("full", True, None),
    "dependency/path": ("dependency", True, "path"), "dependency/preorder": ("dependency-preorder", True, "preorder"),
}  # fmt: skip
"""Strategy, whether paths are merged (None: communities stand in their place), positions."""


def accuracy(
    engine: Engine, name: str, questions: Sequence[Question], samples: Samples, progress: Progress
) -> list[dict[str, Any]]:
    found: dict[str, list[Mapping[str, float]]] = {method: [] for method in METHODS}
    communities = Communities(questions)
    for question in questions:
        for method, (strategy, trees, _) in METHODS.items():
            whole = communities.prompt(engine, question) if trees is None else prompt_of(engine, question, trees)
            ask = partial(answered, engine, question, strategy, whole)
            found[method].append(samples.of(f"{name}/{question.id}/{method}", ask))
        progress.step(f"{name}: {question.id}")
    return list(accuracy_rows(name, found))


def accuracy_rows(name: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[dict[str, Any]]:
    for method, (_, _, positions) in METHODS.items():
        others = {"minus_self": found["self"]}
        if positions == "path":
            others["minus_preorder"] = found["dependency/preorder"]
        yield {
            "part": "accuracy", "set": name, "method": method.partition("/")[0], "positions": positions,
            "n": len(found[method]), "prompt_tokens": float(np.mean(column(found[method], "prompt_tokens"))),
            "ttft_ms": float(np.median(column(found[method], "ttft_ms"))),
            **compared(found[method], ("accuracy", "logprob", "top1"), others),
        }  # fmt: skip


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
            made.append({
                "part": "length", "set": name, "method": method.partition("/")[0],
                "positions": method.partition("/")[2] or None, "n": len(timed), "written_tokens": tokens,
                "visited_share": float(np.mean(shares)),
                "prompt_tokens": float(np.mean([a.prompt_tokens for _, a in timed])),
                "hit_rate": float(np.mean([a.cached_tokens / a.prompt_tokens for _, a in timed])),
                "ttft_ms": float(np.median(mine)), "faster": float(np.median(full) / np.median(mine)),
            })  # fmt: skip
    return made


def first_tokens(engine: Engine, question: Question) -> Iterator[tuple[str, Answer]]:
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
    """Hit rate and time to first token over a stream of requests, with a cache of a fifth of the data.

    Paths written out are asked of another engine: they need more room than the merged ones.
    """
    made: dict[str, list[tuple[float, float]]] = {}
    with opened(model, dtype) as engine:
        whole = {s.entity: s for q in asked for s in q.subgraphs}
        prompts = (prompt_of(engine, Question("", "?", ("",), (s,)), trees=True) for s in whole.values())
        everything = sum(len(s) for prompt in prompts for s in prompt.segments if s.kind is Kind.NODE)
        longest = max(len(prompt_of(engine, q, trees=True)) for q in asked)
        per_token = engine._runner.config.kv_bytes_per_token(2)
    tokens, context = capacity(everything, longest)
    with opened(model, dtype, tokens * per_token / 2**30, context) as engine, opened(model, dtype) as written:
        pool = engine._cache.pool
        for question in asked:
            prompt = prompt_of(engine, question, trees=True)
            cached = engine.answer_prompt(prompt, strategy="dependency", max_tokens=1)
            alone = engine.answer_prompt(prompt, strategy=Uncached(), max_tokens=1)
            text, streaming = prompt_of(written, question, trees=False), Streaming()
            answers = {
                "dependency": alone, "dependency-cached": cached,
                "self": written.answer_prompt(text, strategy="full", max_tokens=1),
                "streaming": written.answer_prompt(text, strategy=streaming, max_tokens=1),
            }  # fmt: skip
            for method, answer in answers.items():
                made.setdefault(method, []).append((answer.timings.ttft, answer.cached_tokens / answer.prompt_tokens))
            progress.step(f"{name}: request {question.id}")
    alone_ms = np.array([t for t, _ in made["dependency"]])
    return [
        {
            "part": "workload", "set": name, "method": method,
            "positions": "path" if method.startswith("dependency") else None, "n": len(samples),
            "prompt_tokens": float(longest), "capacity_tokens": float(pool.capacity * pool.page_size),
            "capacity_share": pool.capacity * pool.page_size / everything,
            "hit_rate": float(np.mean([hit for _, hit in samples])),
            "ttft_ms": float(np.median([t for t, _ in samples])),
            "faster": float(np.median(alone_ms) / np.median([t for t, _ in samples])),
        }
        for method, samples in made.items()
    ]  # fmt: skip
