"""The choice of tokens: scores, the graph, and the best that the budget has room for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.compress.graph import propagate, sources
from ragjax.compress.scorers import Evidence, Scorer
from ragjax.core.compression import Compression


class Quota(NamedTuple):
    """Numbers of each layer: tokens kept, last tokens among them, sources of the graph, edges of each.

    Whole numbers, or int32 where they are on the device: few different programs serve them all.
    """

    kept: Any
    recent: Any
    sources: Any
    edges: Any


def quota(compression: Compression, scorer: Scorer, count: int) -> Quota:
    """Numbers for a prompt of `count` tokens; those kept are the budget, or all if these are fewer."""
    kept = min(compression.budget, count)
    recent = min(kept, scorer.recent(kept, compression.window))
    number = sources(compression.graph, kept) if compression.graph else 0
    edges = compression.graph.neighbours if compression.graph else 0
    return Quota(kept, recent, number, edges)


def choose(s_NK: jax.Array, evidence: Evidence, numbers: Quota, compression: Compression) -> jax.Array:
    """The indexes that a layer keeps, ascending, -1 behind the last: int32 [K, B]; [1, B] with heads "all".

    Pure, so that it can be compiled with `compression` static, and mapped over layers. s_NK: scores (`Scorer.score`).
    compression: its budget, B, is the room for indexes, at least `numbers.kept`.
    """
    graph, most = compression.graph, compression.budget
    n_N = jnp.arange(s_NK.shape[0])
    candidate_N = n_N < evidence.count - numbers.recent

    def of_node(s_N: jax.Array, k_NKD: jax.Array) -> jax.Array:
        after_N = s_N
        if graph is not None:
            counts = numbers.sources, numbers.edges
            after_N = propagate(s_N, k_NKD, candidate_N, *counts, graph, sources(graph, most))
        return keep(after_N, s_N, evidence.count, numbers.kept, numbers.recent, most)

    if compression.heads == "all":
        return of_node(s_NK.mean(1), evidence.k_NKD)[None]
    heads = evidence.k_NKD.shape[1]
    s_KN = jnp.broadcast_to(s_NK, (s_NK.shape[0], heads)).T

    def of_head(head: jax.Array) -> jax.Array:
        return of_node(s_KN[head], evidence.k_NKD[:, head][:, None])

    indexes_KB: jax.Array = jax.lax.map(of_head, jnp.arange(heads))
    return indexes_KB


def keep(
    s_N: jax.Array, first_N: jax.Array, count: jax.Array, kept: jax.Array, recent: jax.Array, most: int
) -> jax.Array:
    """The last `recent` tokens and the best of the others, `kept` in all: indexes ascending, int32 [most], -1 behind.

    first_N: scores before the graph, by which equal ones are ordered; then the lower index comes first. count: int32,
    tokens; rows from there on are padding.
    """
    n_N = jnp.arange(s_N.shape[0])
    kind_N = jnp.where(n_N >= count, 2, jnp.where(n_N >= count - recent, 0, 1))
    best_N = jnp.lexsort((-first_N, -s_N, kind_N)).astype(jnp.int32)
    best_B = jnp.pad(best_N, (0, max(0, most - len(best_N))))[:most]
    chosen_B = jnp.arange(most) < jnp.minimum(kept, count)
    nowhere = np.iinfo(np.int32).max
    index_B = jnp.sort(jnp.where(chosen_B, best_B, nowhere))
    return jnp.where(index_B == nowhere, -1, index_B)
