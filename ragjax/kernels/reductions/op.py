"""Reductions over one layer for selection methods: attention scores, KV deviation, similarity of keys.

An attention score is the probability that a key receives. Scores are summed blockwise from the LSE of an attention
call: no rows x keys array is formed, and entries that a row block does not see are skipped. Averages over heads are
over the heads at hand: under `shard_map` over KV heads every device returns the value for its own, and the docstrings
say how they combine.

Sources: key scores, FusionRAG §3.2 (question-guided selection); segment scores, Cache-Craft §3.1 (eqs. 3, 4 and 14);
KV deviation, CacheBlend as FusionRAG §2.2 has it (eqs. 7, 8); neighbouring keys, GraphKV §4 (eqs. 1 and 3, arXiv
2509.00388). `xla.py` is the form for CPU and the fallback, `triton.py` has the Pallas kernels of key and segment scores
for GPUs. The others have none: the deviation is bound by memory and fused by XLA, the neighbours are a matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragjax.kernels.device import Device
from ragjax.kernels.reductions import triton, xla
from ragjax.kernels.view import View, check

BACKENDS = ("xla", "triton")


class KeyScore(NamedTuple):
    """Score of each key, plain and times the L2 norm of its value (of the same KV head), float32 [S, C] each."""

    plain_SC: jax.Array
    valued_SC: jax.Array


class KVDeviation(NamedTuple):
    """Squared distance of each token's key and value from the cached ones, float32 [T] each."""

    key_T: jax.Array
    value_T: jax.Array


class KeyNeighbours(NamedTuple):
    """Similarity, float32 [I, Y], and index, int32 [I, Y], of each source's most similar keys, best first."""

    cosine_IY: jax.Array
    index_IY: jax.Array


def key_score(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None = None, *, backend: str | None = None
) -> jax.Array:
    """Attention probability that each key receives, summed over the chosen rows and averaged over query heads.

    Under `shard_map` over KV heads: the mean over the device's heads; `lax.pmean` gives the mean over all.

    Args:
        q_THD: queries, as given to `attention.op.paged_interval_attention`.
        lse_TH: the LSE it returned, float32; or that of a larger context (`attention.split.merge_states`), of which the
            scores are then shares.
        view: as given to it.
        chosen_T: bool, the rows that count; None for all.
        backend: "xla" or "triton"; None for Triton where it serves on the default device, else XLA.

    Returns:
        float32 [S, C]; zero for a key that no chosen row sees.

    Raises:
        ValueError: naming the argument that does not fit, or saying why the backend cannot serve the call.
    """
    return _key_scores(q_THD, lse_TH, view, chosen_T, backend, valued=False)[0]


def key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None = None, *, backend: str | None = None
) -> KeyScore:
    """`key_score`, and the same weighted by |value|, in one sweep; arguments, errors and sharding are the same.

    The norm is of the value of that key and KV head: mean over query heads of p * |v|.
    """
    return KeyScore(*_key_scores(q_THD, lse_TH, view, chosen_T, backend, valued=True))


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

    Arguments, errors and sharding are those of `key_score`. row_segment_T, key_segment_SC: int32, the segment of each
    row and of each entry's slots; a number outside of [0, segments) says none. Returns float32 [T, Z]; zeros for a row
    of no segment.
    """
    _check_attention(q_THD, lse_TH, view)
    _expect("row_segment_T", row_segment_T, q_THD.shape[:1], jnp.int32)
    _expect("key_segment_SC", key_segment_SC, view.entries.index_SC.shape, jnp.int32)
    if segments < 1:
        raise ValueError(f"segments is {segments}, not positive")
    backend = _serving(backend, q_THD, view, segments)
    lse_TH, view = restrict(lse_TH, view, (row_segment_T >= 0) & (row_segment_T < segments))
    compute = xla.row_segment_score if backend == "xla" else triton.row_segment_score
    return compute(q_THD, lse_TH, view, row_segment_T, key_segment_SC, segments)


def kv_deviation(k_TKD: jax.Array, v_TKD: jax.Array, view: View, slot_T: jax.Array, offset_T: jax.Array) -> KVDeviation:
    """Squared difference of newly computed keys and values from cached ones, summed over heads and components.

    A cached key is first rotated by its offset, so that keys are compared at equal rotation. Under `shard_map` over KV
    heads: the sum over the device's heads; `lax.psum` gives the sum over all.

    Args:
        k_TKD: new keys, rotated at `view.rows.position_T`; float32, bfloat16 or float16.
        v_TKD: new values, likewise.
        view: its rows, pages, layer and rotation are used.
        slot_T: int32, where the token's cached KV lies (page * C + slot); negative for a row that has none.
        offset_T: int32, RoPE offset of the entry by which that slot takes part.

    Returns:
        float32 [T] for keys and for values. Rows without cached KV and padding rows get zero, whatever their slots and
        new values hold.
    """
    shape = (view.rows.index_T.shape[0], view.pages.k_LPKCD.shape[2], view.pages.k_LPKCD.shape[4])
    for name, x in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        _expect(name, x, shape, jnp.float32, jnp.bfloat16, jnp.float16)
    for name, x in (("slot_T", slot_T), ("offset_T", offset_T)):
        _expect(name, x, shape[:1], jnp.int32)
    _below("slot_T", slot_T, view.pages.k_LPKCD.shape[1] * view.pages.page_size, "slots of the pool")
    return KVDeviation(*xla.kv_deviation(k_TKD, v_TKD, view, slot_T, offset_T))


def key_neighbours(
    k_NKD: jax.Array, valid_N: jax.Array, source_I: jax.Array, count: int, *, asking_NKD: jax.Array | None = None
) -> KeyNeighbours:
    """The `count` keys most similar to each source key: GraphKV's edges (eq. 1) and neighbourhoods (eq. 3).

    A token is one node and its key one vector, that of all KV heads (§4.1: K is n x d, d the hidden size), so the
    cosine is that of the heads side by side. A graph per head is this op mapped over heads, one head at a time. Under
    `shard_map` over KV heads the keys must be gathered before: the best keys of a device's heads do not combine.
    Similarity is as the keys are rotated: give those of one prompt, at their places in it. Memory is O(sources x (count
    + tile)) beside the keys.

    valid_N: bool, keys that take part. source_I: int32, negative for padding. asking_NKD: vectors of the tokens as
    sources, such as their queries; float32, as the keys then are too (None: their keys).

    Returns:
        Cosines and indices, best first, the lower index first among equals; the source itself is left out. Neighbours
        are chosen by the cosine as it is; negative ones are returned as 0, so that a decay 1 - cosine (eq. 5) never
        enhances. Where fewer than `count` others are valid, or the source is not, similarity 0 and index -1. A key of
        zeros has cosine 0 with all.
    """
    if k_NKD.ndim != 3:
        raise ValueError(f"k_NKD has {k_NKD.ndim} axes, not 3")
    _expect("k_NKD", k_NKD, k_NKD.shape, jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint16)
    _expect("valid_N", valid_N, k_NKD.shape[:1], jnp.bool_)
    _expect("source_I", source_I, source_I.shape[:1], jnp.int32)
    if asking_NKD is not None:
        _expect("k_NKD", k_NKD, k_NKD.shape, jnp.float32)
        _expect("asking_NKD", asking_NKD, k_NKD.shape, jnp.float32)
    if count < 1:
        raise ValueError(f"count is {count}, not positive")
    _below("source_I", source_I, k_NKD.shape[0], "keys")
    asking_NKD = k_NKD if asking_NKD is None else asking_NKD
    return KeyNeighbours(*xla.key_neighbours(k_NKD, valid_N, source_I, count, asking_NKD))


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


def _key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, chosen_T: jax.Array | None, backend: str | None, *, valued: bool
) -> tuple[jax.Array, ...]:
    _check_attention(q_THD, lse_TH, view)
    if chosen_T is not None:
        _expect("chosen_T", chosen_T, q_THD.shape[:1], jnp.bool_)
    backend = _serving(backend, q_THD, view)
    lse_TH, view = restrict(lse_TH, view, chosen_T)
    compute = xla.key_scores if backend == "xla" else triton.key_scores
    return compute(q_THD, lse_TH, view, valued=valued)


# ---------------------------------------------------------------------------------------------- checks


def _expect(name: str, x: jax.Array, shape: tuple[int, ...], *dtypes: jax.typing.DTypeLike) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}, not {' or '.join(jnp.dtype(d).name for d in dtypes)}")


def _check_attention(q_THD: jax.Array, lse_TH: jax.Array, view: View) -> None:
    check(q_THD, view)
    _expect("lse_TH", lse_TH, q_THD.shape[:2], jnp.float32)


def _serving(backend: str | None, q_THD: jax.Array, view: View, segments: int = 1) -> str:
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "xla":
        return backend
    reason = triton.refusal(q_THD, view, Device.of(jax.devices()[0]), segments)
    if reason is None:
        return "triton"
    if backend is None:
        return "xla"
    raise ValueError(f"backend {backend!r} cannot serve this call: {reason}")


def _below(name: str, x: jax.Array, end: int, of: str) -> None:
    """Outside of jit alone, where there are values."""
    if isinstance(x, jax.core.Tracer):
        return
    highest = int(np.asarray(x).max(initial=-1))
    if highest >= end:
        raise ValueError(f"{name} holds {highest}, outside of the {end} {of}")
