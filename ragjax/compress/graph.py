"""GraphKV: scores of tokens that resemble important ones change (arXiv 2509.00388, section 4).

The tokens of highest score are sources (eq. 2). A source i has edges e_ij = max(0, cos) to its m most similar tokens
(eqs. 1 and 3), and for every source in whose neighbourhood a token j lies, s_j is multiplied by 1 - e_ij (eqs. 4
and 5), T times. Sources and edges stay those of the first round, so that s_j^(T) = s_j d_j^T.

What the text leaves open is decided so (docs/compression.md): the product over sources of eq. 5, where Algorithm 2
keeps the last factor; cosines of 0 and below are no edges; only tokens that may be dropped take part; keys as they are
cached, rotated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ragjax.core.compression import GraphKV
from ragjax.kernels.reductions.op import key_neighbours


def sources(graph: GraphKV, budget: int) -> int:
    return math.ceil(round(graph.sources * budget, 6))


def propagate(
    s_N: jax.Array,
    k_NKD: jax.Array,
    candidate_N: jax.Array,
    number: jax.Array,
    edges: jax.Array,
    graph: GraphKV,
    most: int,
) -> jax.Array:
    """Scores after the graph's rounds, float32 [N]. k_NKD: the tokens' keys.

    candidate_N: tokens that take part; the others keep their scores. number: int32, sources of this layer; among equal
    scores the lower index is one first. edges: int32, most similar tokens that a source sends to. most: room for
    sources, static.
    """
    if graph.rounds == 0:
        return s_N
    rank_I = jnp.arange(min(most, s_N.shape[0]))
    ordered_N = jnp.lexsort((-s_N, ~candidate_N)).astype(jnp.int32)
    source_I = ordered_N[: len(rank_I)]
    source_I = jnp.where((rank_I < number) & candidate_N[source_I], source_I, -1)
    count = min(graph.neighbours, s_N.shape[0])
    cosine_IY, index_IY = key_neighbours(k_NKD, candidate_N, source_I, count)
    edge_IY = jnp.minimum(cosine_IY, 1.0)
    if graph.order == "ordered":
        place_N = jnp.zeros_like(ordered_N).at[ordered_N].set(jnp.arange(len(ordered_N), dtype=jnp.int32))
        edge_IY = jnp.where(place_N[index_IY] > rank_I[:, None], edge_IY, 0.0)
    edge_IY = jnp.where((index_IY >= 0) & (jnp.arange(count) < edges), edge_IY, 0.0)  # the most similar come first
    return s_N * jnp.exp(graph.rounds * jnp.zeros_like(s_N).at[index_IY].add(jnp.log1p(-edge_IY)))
