"""Attention, and what the papers of selective recompute say, transcribed over arrays: no pages, offsets or caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import neighbours_digest
from ragjax.cache.tree import Provenance
from ragjax.core import Kind, Measure, Pass, Prompt, Segment
from ragjax.reuse import strategies
from ragjax.reuse.base import segments_of
from tests.support import tiny
from tests.support.executor import Array, Dense, Done, Executor, model


def isolated(prompt: Prompt, *, moved: bool = True) -> tuple[Array, Array]:
    """K and V [L, T, K, D] of every chunk computed behind the system prompt alone, at its place; zeros for joins."""
    system = prompt.segments[0].tokens
    parts = []
    for i, segment in enumerate(prompt.segments):
        if segment.kind is Kind.CHUNK:
            shift = prompt.starts[i] - len(system) if moved else 0
            parts.append(shifted(model().dense(np.concatenate([system, segment.tokens])), len(system), shift))
        elif segment.kind is Kind.SYSTEM:
            parts.append(shifted(model().dense(segment.tokens), 0, 0))
        else:
            parts.append(shifted(model().dense(segment.tokens * 0), 0, 0))
    return np.concatenate([k for k, _ in parts], 1), np.concatenate([v for _, v in parts], 1)


def shifted(dense: Dense, begin: int, shift: int) -> tuple[Array, Array]:
    """K and V from token `begin` on, K turned further."""
    n = dense.k.shape[1]
    k = np.stack([model().rotate(k, np.full(n, shift)) for k in dense.k])
    return k[:, begin:], dense.v[:, begin:]


def fused(prompt: Prompt, i: int, behind: Sequence[Segment]) -> Dense:
    """FusionRAG eq. 10: chunk i computed behind the isolated KV of its neighbours; the last tokens are the chunk's."""
    context = Prompt((prompt.segments[0], *behind, prompt.segments[i]))
    rows = np.arange(context.starts[-2], len(context))
    return model().dense(context.tokens, rows=rows, kept=isolated(context))


def two_turns(seed: int = 3) -> Prompt:
    """system, A, B, question, answer, C, D, question."""
    first, second = tiny.prompt(seed, chunks=(30, 41)), tiny.prompt(seed + 1, chunks=(25, 37))
    answer = Segment("answer", Kind.QUERY, np.arange(60, 75, dtype=np.int32))
    return Prompt((*first.segments, answer, *(replace(s, id=f"second {s.id}") for s in second.segments[1:])))


def dense(prompt: Prompt) -> Array:
    """Logits of the last token by causal attention."""
    return model().dense(prompt.tokens).logits[-1]


def dense_naive(prompt: Prompt) -> Array:
    """The same over isolated chunks, moved to their places; all else sees everything before it."""
    rows = np.setdiff1d(np.arange(len(prompt)), indices_of(prompt, Kind.CHUNK))
    return model().dense(prompt.tokens, rows=rows, kept=isolated(prompt)).logits[-1]


def joins(prompt: Prompt) -> NDArray[np.int64]:
    return indices_of(prompt, Kind.QUERY)


def indices_of(prompt: Prompt, kind: Kind) -> NDArray[np.int64]:
    parts = [np.arange(prompt.starts[i], prompt.starts[i + 1]) for i in segments_of(prompt, kind)]
    return np.concatenate(parts)


def repaired(prompt: Prompt, kept: tuple[Array, Array], chosen: Sequence[int]) -> Array:
    """FusionRAG eq. 9: logits of the last token, chosen tokens and joins computed over everything before them."""
    rows = np.array(sorted({*chosen, *joins(prompt)}))
    return model().dense(prompt.tokens, rows=rows, kept=kept).logits[-1]


def highest(scores: dict[int, float], count: int) -> list[int]:
    """The `count` orders of highest score, lower orders first among equals."""
    return sorted(sorted(scores, key=lambda order: (-scores[order], order))[:count])


def deviations(prompt: Prompt, kept: tuple[Array, Array], layer: int = 1) -> dict[int, float]:
    """Eq. 7 at one layer (the second), of keys, for every chunk token."""
    far = model().dense(prompt.tokens).k[layer] - kept[0][layer]
    return {order: float((far[order] ** 2).sum()) for order in map(int, indices_of(prompt, Kind.CHUNK))}


def chosen_of(done: Done, prompt: Prompt) -> list[int]:
    """Chunk tokens among the rows of the last pass."""
    last = done.passes[-1]
    assert isinstance(last, Pass)
    return [int(order) for order in last.rows if order not in set(joins(prompt))]


def results_of(done: Done, what: Measure) -> NDArray[np.float32]:
    found = [results[what] for results in done.results if what in results]
    assert len(found) == 1
    return found[0]


def counted(prompt: Prompt, ratio: float) -> int:
    return math.ceil(round(ratio * len(indices_of(prompt, Kind.CHUNK)), 9))


def plant(executor: Executor, prompt: Prompt, i: int, behind: Sequence[Segment]) -> bytes:
    """Keep chunk i as preprocessed behind these neighbours, as offline preprocessing would; its digest."""
    dense, cache = fused(prompt, i, behind), executor.cache
    n, system = len(prompt.segments[i]), len(prompt.segments[0])
    run = cache.reserve(n)
    slots = run.slots(executor.page_size)
    executor.k[:, slots], executor.v[:, slots] = dense.k[:, -n:], dense.v[:, -n:]
    digest = neighbours_digest([segment.tokens for segment in behind])
    with cache.matcher.match_prefix(prompt.segments[0].tokens) as context:
        assert context.complete, "run a strategy first, so that the system prompt is kept"
        local_start = system + sum(len(segment) for segment in behind)
        cache.admitter.admit_segment(
            context, prompt.segments[i].tokens, run, local_start, Provenance.APPROXIMATE, "fusion", behind=digest,
        )  # fmt: skip
    cache.free(run)
    return digest


def preprocessed(executor: Executor, prompt: Prompt) -> tuple[Prompt, tuple[Array, Array]]:
    """The prompt with every chunk but the last fused behind the others; the KV that its chunks then have."""
    executor.run(strategies()["naive"], prompt)
    k, v = isolated(prompt)
    marked = list(prompt.segments)
    chunks = segments_of(prompt, Kind.CHUNK)
    for i in chunks[:-1]:
        behind = [prompt.segments[j] for j in reversed(chunks) if j != i]
        begin, n = prompt.starts[i], len(prompt.segments[i])
        local_start = len(prompt.segments[0]) + sum(len(segment) for segment in behind)
        fresh_k, fresh_v = shifted(fused(prompt, i, behind), local_start, begin - local_start)
        k[:, begin : begin + n], v[:, begin : begin + n] = fresh_k, fresh_v
        marked[i] = replace(prompt.segments[i], behind=plant(executor, prompt, i, behind))
    return Prompt(tuple(marked)), (k, v)
