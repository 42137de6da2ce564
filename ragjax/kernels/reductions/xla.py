"""The attention scores in XLA: blockwise sweeps over the visible keys, for CPU and as the fallback.

`op` says what each computes. They take LSE and view as `op.restrict` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.attention.xla import Tile, dot, fold_heads, gather_tile, lists, masked_logits
from ragjax.kernels.view import View


def _probabilities(view: View, block: Sequence[Any]) -> Callable[[jax.Array], tuple[jax.Array, Tile]]:
    """From places in the list of keys of a row block (`_blocked`) to the probabilities of its rows over these keys,
    float32 [K, M, N], and their tile.
    """
    q_BHD, lse_BH, index_B, visited = block
    kv_heads = view.pages.k_LPKCD.shape[2]
    q_KMD = fold_heads(q_BHD.astype(jnp.float32) * view.scale, kv_heads)
    lse_KM1 = fold_heads(lse_BH[..., None], kv_heads)

    def over(place_W: jax.Array) -> tuple[jax.Array, Tile]:
        tile = gather_tile(q_KMD, index_B, view, visited, place_W)
        return jnp.exp(masked_logits(tile, view) - lse_KM1), tile

    return over


def _blocked(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> tuple[Any, ...]:
    """q, LSE, token indices and lists with a leading axis of row blocks."""
    by_rows = (x.reshape(-1, view.block_rows, *x.shape[1:]) for x in (q_THD, lse_TH, view.rows.index_T))
    return (*by_rows, lists(view))


def key_scores(q_THD: jax.Array, lse_TH: jax.Array, view: View, *, valued: bool) -> tuple[jax.Array, ...]:
    """See `op.key_scores`; without `valued` the plain score alone. Float32 [S, C] each, summed block after block."""
    shape, heads = view.entries.index_SC.shape, q_THD.shape[1]

    def one_block(scores: tuple[jax.Array, ...], arrays: tuple[Any, ...]) -> tuple[tuple[jax.Array, ...], None]:
        *_, visited = arrays
        over = _probabilities(view, arrays)

        def step(place_W: jax.Array, scores: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            prob_KMN, tile = over(place_W)
            sums_KN = prob_KMN.sum(1)
            norm_KN = jnp.sqrt(jnp.square(tile.v_KND.astype(jnp.float32)).sum(-1))  # of values; of hidden ones zero
            kinds = (sums_KN, sums_KN * norm_KN) if valued else (sums_KN,)
            return tuple(
                score_E.at[tile.slot_N].add(kind_KN.sum(0) / heads)
                for score_E, kind_KN in zip(scores, kinds, strict=True)
            )

        return visited.sweep(step, scores), None

    start = tuple(jnp.zeros(math.prod(shape)) for _ in range(2 if valued else 1))
    scores, _ = lax.scan(one_block, start, _blocked(q_THD, lse_TH, view))
    return tuple(score_E.reshape(shape) for score_E in scores)


def row_segment_score(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, row_segment_T: jax.Array, key_segment_SC: jax.Array, segments: int
) -> jax.Array:
    heads, b = q_THD.shape[1], view.block_rows
    in_segment_SC = (key_segment_SC >= 0) & (key_segment_SC < segments)
    segment_E = jnp.where(in_segment_SC, key_segment_SC, segments).reshape(-1)
    index_E = view.entries.index_SC.reshape(-1)

    def one_block(arrays: tuple[Any, ...]) -> jax.Array:
        segment_B, *block = arrays
        *_, index_B, visited = block
        over = _probabilities(view, block)

        def step(place_W: jax.Array, score_BZ: jax.Array) -> jax.Array:
            prob_KMN, tile = over(place_W)
            prob_BN = prob_KMN.reshape(-1, b, prob_KMN.shape[-1]).sum(0) / heads
            index_N, segment_N = index_E[tile.slot_N], segment_E[tile.slot_N]
            own_BN = (segment_B[:, None] == segment_N) & (index_B[:, None] == index_N)
            prob_BN = jnp.where(own_BN, 0.0, prob_BN)
            return score_BZ + dot(prob_BN, jax.nn.one_hot(segment_N, segments), ((1,), (0,)), batch=())

        score_BZ: jax.Array = visited.sweep(step, jnp.zeros((b, segments)))
        return score_BZ

    blocked = (row_segment_T.reshape(-1, b), *_blocked(q_THD, lse_TH, view))
    score_NBZ: jax.Array = lax.map(one_block, blocked)
    return score_NBZ.reshape(-1, segments)
