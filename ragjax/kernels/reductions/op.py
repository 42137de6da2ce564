"""Reductions over one layer for selection methods: attention scores, deviation and similarity of keys.

An attention score is the probability that a key receives. Scores are summed blockwise from the LSE of an attention
call: no rows x keys array is formed, and entries that a row block does not see are skipped. Averages over heads are
over the heads at hand: under `shard_map` over KV heads every device returns the value for its own, and the docstrings
say how they combine.

Sources: key scores, FusionRAG §3.2 (question-guided selection); segment scores, Cache-Craft §3.1 (eqs. 3, 4 and 14);
deviation, CacheBlend as FusionRAG §2.2 has it (eqs. 7, 8); neighbouring keys, GraphKV §4 (eqs. 1 and 3, arXiv
2509.00388). `xla.py` is the fallback, `triton.py` has the Pallas kernels of key and segment scores for GPUs,
`kernels/cpu/score_tile.py` the one of key scores for CPUs. The others have none: the deviation is bound by memory and
fused by XLA, the neighbours are a matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.attention.op import cpu_refusal
from ragjax.kernels.attention.xla import dot
from ragjax.kernels.device import Device
from ragjax.kernels.pages import from_storage
from ragjax.kernels.reductions import triton, xla
from ragjax.kernels.rope import rotate
from ragjax.kernels.view import View

BACKENDS = ("cpu", "triton", "xla")
"""Best first."""

KEY_TILE = 1024
"""Keys that `key_neighbours` compares with the sources at a time."""


class KeyNeighbours(NamedTuple):
    """Similarity, float32 [I, Y], and index, int32 [I, Y], of each source's most similar keys, best first."""

    cosine_IY: jax.Array
    index_IY: jax.Array


def key_scores(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    chosen_T: jax.Array | None = None,
    *,
    valued: bool = True,
    backend: str | None = None,
) -> tuple[jax.Array, ...]:
    """Attention probability that each key receives, summed over the chosen rows and averaged over query heads.

    Under `shard_map` over KV heads: the mean over the device's heads; `lax.pmean` gives the mean over all.

    Args:
        q_THD: queries, as given to `attention.op.paged_interval_attention`.
        lse_TH: the LSE it returned, float32; or that of a larger context (`attention.split.merge_states`), of which the
            scores are then shares.
        view: as given to it.
        chosen_T: bool, the rows that count; None for all.
        valued: give the same times the L2 norm of the key's value too: the mean over query heads of p * |v|.
        backend: "xla", "cpu" or "triton"; None for the one that is fastest on the default device.

    Returns:
        float32 [S, C], one array or two; zero for a key that no chosen row sees.

    Raises:
        ValueError: saying why the backend cannot serve the call.
    """
    backend = _serving(backend, q_THD, view)
    lse_TH, view = restrict(lse_TH, view, chosen_T)
    if backend == "cpu":
        from ragjax.kernels.cpu import attention as cpu  # needs llvmlite

        return cpu.key_scores(q_THD, lse_TH, view, valued=valued)
    compute = xla.key_scores if backend == "xla" else triton.key_scores
    return compute(q_THD, lse_TH, view, valued=valued)


def row_segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
    *,
    backend: str | None = None,
) -> jax.Array:
    """Attention probability that each row gives to the keys of each segment, averaged over query heads.

    Summed over the rows of a segment, this is Cache-Craft's inter attention on the earlier segments (eq. 3) and the
    segment's intra attention. That is from each token to previous tokens (eq. 4, strictly below the diagonal), so a
    token's attention to itself (equal index) is left out of its own segment. Tokens are ranked by eq. 14, a sum of
    columns of this.

    Arguments, errors and sharding are those of `key_scores`. row_segment_T, key_segment_SC: int32, the segment of each
    row and of each entry's slots; a number outside of [0, segments) says none. Returns float32 [T, Z]; zeros for a row
    of no segment.
    """
    backend = _serving(backend, q_THD, view, segments)
    lse_TH, view = restrict(lse_TH, view, (row_segment_T >= 0) & (row_segment_T < segments))
    compute = xla.row_segment_score if backend == "xla" else triton.row_segment_score
    return compute(q_THD, lse_TH, view, row_segment_T, key_segment_SC, segments)


def key_deviation(k_TKD: jax.Array, view: View, slot_T: jax.Array, offset_T: jax.Array) -> jax.Array:
    """Squared difference of newly computed keys from cached ones, summed over heads and components.

    A cached key is first rotated by its offset, so that keys are compared at equal rotation. Under `shard_map` over KV
    heads: the sum over the device's heads; `lax.psum` gives the sum over all.

    Args:
        k_TKD: new keys, rotated at `view.rows.position_T`; float32, bfloat16 or float16.
        view: its rows, pages, layer and rotation are used.
        slot_T: int32, where the token's cached KV lies (page * C + slot); negative for a row that has none.
        offset_T: int32, RoPE offset of the entry by which that slot takes part.

    Returns:
        float32 [T]. Rows without cached KV and padding rows get zero, whatever their slots and new keys hold.
    """
    compared_T = (slot_T >= 0) & (view.rows.index_T >= 0)
    slot_T = jnp.where(compared_T, slot_T, 0)
    page_T, slot_T = slot_T // view.pages.page_size, slot_T % view.pages.page_size
    cos_TR, sin_TR = view.rotation.at(offset_T)
    kept_TKD = from_storage(view.pages.k_LPKCD[view.layer, page_T, :, slot_T]).astype(jnp.float32)
    moved_TKD = rotate(kept_TKD, cos_TR[:, None], sin_TR[:, None])
    return jnp.where(compared_T, jnp.square(k_TKD.astype(jnp.float32) - moved_TKD).sum((1, 2)), 0.0)


def key_neighbours(k_NKD: jax.Array, valid_N: jax.Array, source_I: jax.Array, count: int) -> KeyNeighbours:
    """The `count` keys most similar to each source key: GraphKV's edges (eq. 1) and neighbourhoods (eq. 3).

    A token is one node and its key one vector, that of all KV heads (§4.1: K is n x d, d the hidden size), so the
    cosine is that of the heads side by side. A graph per head is this op mapped over heads, one head at a time. Under
    `shard_map` over KV heads the keys must be gathered before: the best keys of a device's heads do not combine.
    Similarity is as the keys are rotated: give those of one prompt, at their places in it. Memory is O(sources x (count
    + tile)) beside the keys.

    valid_N: bool, keys that take part. source_I: int32, negative for padding.

    Returns:
        Cosines and indices, best first, the lower index first among equals; the source itself is left out. Neighbours
        are chosen by the cosine as it is; negative ones are returned as 0, so that a decay 1 - cosine (eq. 5) never
        enhances. Where fewer than `count` others are valid, or the source is not, similarity 0 and index -1. A key of
        zeros has cosine 0 with all.
    """
    # keeps the best so far, tile after tile; `lax.top_k` is stable, so ties go to the lower index
    n = k_NKD.shape[0]
    tile = min(KEY_TILE, n)
    real_I = (source_I >= 0) & valid_N[source_I]
    source_IE, source_length_I = _flat(k_NKD[source_I], real_I)

    def step(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin = jnp.minimum(i * tile, n - tile)  # the last tile may overlap the one before
        index_N = begin + jnp.arange(tile, dtype=jnp.int32)
        fresh_N = lax.dynamic_slice_in_dim(valid_N, begin, tile) & (index_N >= i * tile)
        key_NE, length_N = _flat(lax.dynamic_slice_in_dim(k_NKD, begin, tile), fresh_N)
        cosine_IN = dot(source_IE, key_NE, ((1,), (1,)), batch=()) / (source_length_I[:, None] * length_N)
        compared_IN = fresh_N & real_I[:, None] & (source_I[:, None] != index_N)
        joined_IN = jnp.concatenate([best[0], jnp.where(compared_IN, cosine_IN, -jnp.inf)], axis=1)
        named_IN = jnp.concatenate([best[1], jnp.broadcast_to(index_N, cosine_IN.shape)], axis=1)
        cosine_IY, place_IY = lax.top_k(joined_IN, count)
        return cosine_IY, jnp.take_along_axis(named_IN, place_IY, 1)

    shape = source_I.shape[0], count
    start = jnp.full(shape, -jnp.inf), jnp.full(shape, -1, jnp.int32)
    cosine_IY, index_IY = lax.fori_loop(0, -(-n // tile), step, start)
    return KeyNeighbours(jnp.maximum(jnp.where(jnp.isneginf(cosine_IY), 0.0, cosine_IY), 0.0), index_IY)


def _flat(k_NKD: jax.Array, valid_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys with their heads side by side, zero where not valid, and their lengths, infinite for keys of zeros."""
    k_NKD = from_storage(jnp.where(valid_N[:, None, None], k_NKD, jnp.zeros((), k_NKD.dtype)))
    flat_NE = k_NKD.reshape(k_NKD.shape[0], -1)
    length_N = jnp.sqrt(jnp.square(flat_NE.astype(jnp.float32)).sum(-1))
    return flat_NE, jnp.where(length_N > 0, length_N, jnp.inf)


def restrict(lse_TH: jax.Array, view: View, chosen_T: jax.Array | None) -> tuple[jax.Array, View]:
    """An LSE of +inf, where all probabilities are zero, for rows that do not count or see nothing; and a view in which
    row blocks without a row that counts visit no entry.
    """
    if chosen_T is None:
        chosen_T = view.rows.index_T >= 0
    lse_TH = jnp.where(chosen_T[:, None] & ~jnp.isneginf(lse_TH), lse_TH, jnp.inf)
    blocks = view.blocks
    visits_N = chosen_T.reshape(-1, view.block_rows).any(1)
    count_N, runs_N = (jnp.where(visits_N, x, 0) for x in (blocks.count_N, blocks.runs_N))
    return lse_TH, replace(view, blocks=replace(blocks, count_N=count_N, runs_N=runs_N))


def _serving(backend: str | None, q_THD: jax.Array, view: View, segments: int | None = None) -> str:
    """The backend that is named, or the first that serves. segments: of scores by segment, which have no CPU kernel."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    device = Device.of(jax.devices()[0])

    def refusal(name: str) -> str | None:
        if name == "triton":
            return triton.refusal(q_THD, view, device, segments or 1)
        if name == "cpu":
            return cpu_refusal(q_THD, view, device) if segments is None else "it has no scores by segment"
        return None

    for name in (backend,) if backend else BACKENDS:
        if (reason := refusal(name)) is None:
            return name
    raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")
