"""The attention scores of `reductions` in Pallas for GPUs, lowered through Triton.

Key scores: one program serves an entry and a KV head. It rotates the entry's keys by the entry's offset once and walks
the row blocks that see the entry, so each sum has one owner: no atomics, and the same bits in every run. Row by
segment scores: one program serves a block of rows and a KV head, as attention does; the sum over the keys of a segment
is a product with their indicator, which tensor cores take. Both take LSE and view as `op.restrict` makes them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ragjax.kernels.attention import triton as attention_triton
from ragjax.kernels.attention.split import deepest
from ragjax.kernels.attention.triton import LEAST_ROWS, LOG2E, Halves, Tiling, dot, fold, part, rotate_halves
from ragjax.kernels.blocks import Blocks
from ragjax.kernels.device import Device
from ragjax.kernels.table import PageTable, sees
from ragjax.kernels.view import View

MOST_ROWS = 64
"""Folded rows of a program at most: next to the logits a sum of their size is kept."""

MOST_SEGMENTS = 128
"""Segments at most: a program keeps a sum for each of its rows and each of them."""


def refusal(q_THD: jax.Array, view: View, device: Device, segments: int = 1) -> str | None:
    if segments > MOST_SEGMENTS:
        return f"{segments} segments are more than {MOST_SEGMENTS}"
    if reason := attention_triton.refusal(q_THD, view, device):
        return reason
    cut = tiling(q_THD, view, device, segments)
    return device.lacks_shared(shared_bytes(cut.rows, segments, view.pages.k_LPKCD, cut.stages))


def tiling(q_THD: jax.Array, view: View, device: Device, segments: int = 1) -> Tiling:
    """The cut for these shapes, as far as registers and shared memory allow; lists are not split.

    float32 products run on plain cores with their operands in registers: fewer rows and more warps.
    """
    pages = view.pages.k_LPKCD
    groups = max(pl.next_power_of_2(q_THD.shape[1] // pages.shape[2]), LEAST_ROWS // view.block_rows)
    folded, wide = groups * view.block_rows, pages.dtype == jnp.float32
    rows = max(min(folded, MOST_ROWS // 2 if wide else MOST_ROWS), groups)
    warps = 8 if wide or pages.shape[3] > 64 else 4
    stages = deepest(functools.partial(shared_bytes, rows, segments, pages), device)
    return Tiling(rows, groups, folded // rows, splits=1, warps=warps, stages=stages)


def shared_bytes(rows: int, segments: int, k_LPKCD: jax.Array, stages: int) -> int:
    *_, slots, dim = k_LPKCD.shape
    size = k_LPKCD.dtype.itemsize
    page, queries, flight = slots * dim * size, rows * dim * size, stages // 2
    operands = queries + (rows + _width(segments)) * slots * size  # and probabilities, and which key has which segment
    return max(page + max(flight, 1) * (queries + 4), max(page, operands) + flight * (page + 20 * slots + 4))


def _width(segments: int) -> int:
    return max(pl.next_power_of_2(segments), LEAST_ROWS)


def key_scores(
    q_THD: jax.Array, lse_TH: jax.Array, view: View, *, valued: bool, interpret: bool = False
) -> tuple[jax.Array, ...]:
    pages, entries, rotation = view.pages, view.entries, view.rotation
    cut = tiling(q_THD, view, Device.of(jax.devices()[0]))
    layers, pool, kv_heads, slots, dim = pages.k_LPKCD.shape
    # queries are not rotated here, so they are scaled and narrowed before
    q_KXMD = fold((q_THD.astype(jnp.float32) * (view.scale * LOG2E)).astype(pages.k_LPKCD.dtype), kv_heads, cut)
    index_XM = jnp.repeat(view.rows.index_T, cut.groups).reshape(-1, cut.rows)
    block_SN, count_S = _transposed(view.blocks)
    size, blocks = block_SN.shape

    mine, head = part(lambda s, k: s), part(lambda s, k: k)
    pool_spec = pl.BlockSpec((layers, pool, None, slots, dim), lambda s, k: (0, 0, k, 0, 0))
    shared = rotation.cos_NR, rotation.sin_NR, jnp.asarray(view.layer, jnp.int32).reshape(1)
    kinds = 2 if valued else 1
    scores = pl.pallas_call(
        functools.partial(_key_score_kernel, parts=cut.parts),
        grid=(size, kv_heads),
        in_specs=[
            head(*q_KXMD.shape[1:]), head(*q_KXMD.shape[1:3]), part()(*index_XM.shape), pool_spec, pool_spec,
            mine(blocks), mine(3), mine(slots), mine(slots), mine(slots), *(part()(*x.shape) for x in shared),
        ],
        out_specs=[part(lambda s, k: k, lambda s, k: s)(slots)] * kinds,
        out_shape=[jax.ShapeDtypeStruct((kv_heads, size, slots), jnp.float32)] * kinds,
        compiler_params=pltriton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="key_score",
    )(
        q_KXMD, _fold_lse(lse_TH, kv_heads, cut), index_XM, pages.k_LPKCD, pages.v_LPKCD, block_SN,
        _extents(entries, count_S), entries.index_SC, entries.hide_from_SC,
        entries.hide_until_SC, *shared,
    )  # fmt: skip
    return tuple(score_KSC.sum(0) / q_THD.shape[1] for score_KSC in scores)


def _key_score_kernel(
    q_ref: Any, lse_ref: Any, row_index_ref: Any, k_ref: Any, v_ref: Any, block_ref: Any, extent_ref: Any,
    key_index_ref: Any, hide_from_ref: Any, hide_until_ref: Any, cos_ref: Any, sin_ref: Any, layer_ref: Any,
    score_ref: Any, *valued_ref: Any, parts: int,
) -> None:  # fmt: skip
    """One program: keys [C, D] of one entry and KV head over the row blocks that see the entry."""
    _, rows, dim = q_ref.shape
    slots = k_ref.shape[2]
    half = dim // 2
    dtype = k_ref.dtype
    count, page, offset = extent_ref[0], extent_ref[1], extent_ref[2]
    layer = layer_ref[0]
    k1_CR, k2_CR = (k_ref[layer, page, :, pl.ds(begin, half)].astype(jnp.float32) for begin in (0, half))
    k_CR = rotate_halves(k1_CR, k2_CR, cos_ref, sin_ref, offset, dtype)
    index_C, from_C, until_C = key_index_ref[...][None], hide_from_ref[...][None], hide_until_ref[...][None]

    def visit(i: jax.Array, score_MC: jax.Array) -> jax.Array:
        x = block_ref[lax.div(i, jnp.int32(parts))] * parts + lax.rem(i, jnp.int32(parts))
        row_index_M1 = row_index_ref[x, :][:, None]
        logits_MC = dot(q_ref[x, :, pl.ds(0, half)], k_CR[0], trans_b=True)
        logits_MC += dot(q_ref[x, :, pl.ds(half, half)], k_CR[1], trans_b=True)
        seen_MC = sees(row_index_M1, index_C, from_C, until_C)
        return score_MC + jnp.exp2(jnp.where(seen_MC, logits_MC, -jnp.inf) - lse_ref[x, :][:, None])

    score_C = lax.fori_loop(0, count * parts, visit, jnp.zeros((rows, slots), jnp.float32)).sum(axis=0)
    score_ref[...] = score_C
    if valued_ref:
        v_CD = v_ref[layer, page, :, :].astype(jnp.float32)
        norm_C = jnp.sqrt((v_CD * v_CD).sum(axis=1))
        # a slot nobody sees may hold NaN
        valued_ref[0][...] = jnp.where(score_C > 0.0, score_C * norm_C, 0.0)


def row_segment_score(
    q_THD: jax.Array,
    lse_TH: jax.Array,
    view: View,
    row_segment_T: jax.Array,
    key_segment_SC: jax.Array,
    segments: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    pages, entries, blocks, rotation = view.pages, view.entries, view.blocks, view.rotation
    cut = tiling(q_THD, view, Device.of(jax.devices()[0]), segments)
    layers, pool, kv_heads, slots, dim = pages.k_LPKCD.shape
    q_KXMD = fold(q_THD, kv_heads, cut)
    programs = q_KXMD.shape[1]
    index_XM, segment_XM = (jnp.repeat(x, cut.groups).reshape(-1, cut.rows) for x in (view.rows.index_T, row_segment_T))
    width = _width(segments)

    def own(x: Any, *_: Any) -> Any:  # the last rows, which see most, start first
        return programs - 1 - x

    mine, listed, headed = part(own), part(lambda x, *_: own(x) // cut.parts), part(lambda x, k: k, own)
    size = entries.request_S.shape[0]
    shared = (
        entries.page_S, entries.offset_S, entries.index_SC, entries.hide_from_SC,
        entries.hide_until_SC,
        key_segment_SC, rotation.cos_NR, rotation.sin_NR, jnp.asarray(view.layer, jnp.int32).reshape(1),
    )  # fmt: skip
    rows = cut.rows // cut.groups
    score_KXBZ = pl.pallas_call(
        functools.partial(_segment_kernel, scale=view.scale * LOG2E, groups=cut.groups),
        grid=(programs, kv_heads),
        in_specs=[
            headed(cut.rows, dim), headed(cut.rows), mine(cut.rows), mine(cut.rows),
            pl.BlockSpec((layers, pool, None, slots, dim), lambda x, k: (0, 0, k, 0, 0)),
            listed(size), listed(size), listed(1), *(part()(*x.shape) for x in shared),
        ],
        out_specs=headed(rows, width),
        out_shape=jax.ShapeDtypeStruct((kv_heads, programs, rows, width), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="row_segment_score",
    )(
        q_KXMD, _fold_lse(lse_TH, kv_heads, cut), index_XM, segment_XM, pages.k_LPKCD,
        blocks.entry_NS, blocks.end_NU, blocks.runs_N[:, None], *shared,
    )  # fmt: skip
    score_TZ: jax.Array = score_KXBZ.sum(0).reshape(-1, width)[:, :segments]
    return score_TZ / q_THD.shape[1]


def _segment_kernel(
    q_ref: Any, lse_ref: Any, row_index_ref: Any, row_segment_ref: Any, k_ref: Any, entry_ref: Any, end_ref: Any,
    runs_ref: Any, page_ref: Any, offset_ref: Any, key_index_ref: Any, hide_from_ref: Any, hide_until_ref: Any,
    segment_ref: Any, cos_ref: Any, sin_ref: Any, layer_ref: Any, score_ref: Any, *, scale: float, groups: int,
) -> None:  # fmt: skip
    """One program: rows [M, D] of one KV head over their list, summed into segments [M, Z] and then over the group."""
    rows, dim = q_ref.shape
    width = score_ref.shape[-1]
    half = dim // 2
    dtype = k_ref.dtype
    layer = layer_ref[0]
    row_index_M1, row_segment_M1, lse_M1 = (
        row_index_ref[...][:, None],
        row_segment_ref[...][:, None],
        lse_ref[...][:, None],
    )
    q1_MR = q_ref[:, pl.ds(0, half)].astype(jnp.float32) * scale
    q2_MR = q_ref[:, pl.ds(half, half)].astype(jnp.float32) * scale
    name_Z = lax.broadcasted_iota(jnp.int32, (1, width), 1)

    def visit(item: jax.Array, score_MZ: jax.Array, q_MR: Halves) -> jax.Array:
        entry = entry_ref[item]
        page = page_ref[entry]
        logits_MC = dot(q_MR[0], k_ref[layer, page, :, pl.ds(0, half)], trans_b=True)
        logits_MC += dot(q_MR[1], k_ref[layer, page, :, pl.ds(half, half)], trans_b=True)
        index_C, from_C, until_C = (x[entry, :][None] for x in (key_index_ref, hide_from_ref, hide_until_ref))
        segment_C = segment_ref[entry, :]
        seen_MC = sees(row_index_M1, index_C, from_C, until_C)
        own_MC = (segment_C[None] == row_segment_M1) & (index_C == row_index_M1)
        prob_MC = jnp.exp2(jnp.where(seen_MC & ~own_MC, logits_MC, -jnp.inf) - lse_M1)
        gain_MZ: jax.Array = dot(prob_MC.astype(dtype), (segment_C[:, None] == name_Z).astype(dtype))
        return score_MZ + gain_MZ

    def run(u: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, score_MZ = carry
        end = end_ref[u]
        q_MR = rotate_halves(q1_MR, q2_MR, cos_ref, sin_ref, -offset_ref[entry_ref[begin]], dtype)
        return end, lax.fori_loop(begin, end, functools.partial(visit, q_MR=q_MR), score_MZ)

    start = jnp.int32(0), jnp.zeros((rows, width), jnp.float32)
    _, score_MZ = lax.fori_loop(0, runs_ref[0], run, start)
    score_ref[...] = score_MZ.reshape(rows // groups, groups, width).sum(axis=1)


def _transposed(blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """For each entry the row blocks that visit it, ascending, int32 [S, N], and how many, int32 [S]."""
    place_NS = jnp.argsort(blocks.entry_NS, axis=1)  # the lists are permutations of all entries
    seen_SN = (place_NS < blocks.count_N[:, None]).T
    return jnp.argsort(~seen_SN, axis=1, stable=True).astype(jnp.int32), seen_SN.sum(1, dtype=jnp.int32)


def _extents(entries: PageTable, count_S: jax.Array) -> jax.Array:
    """Row blocks, page and offset of each entry, int32 [S, 3]; zeros where no row block looks, for an unused entry may
    name any page and any angle.
    """
    return jnp.where(count_S > 0, jnp.stack([count_S, entries.page_S, entries.offset_S]), 0).T


def _fold_lse(lse_TH: jax.Array, kv_heads: int, cut: Tiling) -> jax.Array:
    """The LSE for base 2, [K, X, M]; heads that pad a group get +inf, where all probabilities are zero."""
    real_KXM, lse_KXM = (fold(x[..., None], kv_heads, cut)[..., 0] for x in (jnp.ones_like(lse_TH), lse_TH))
    return jnp.where(real_KXM > 0, lse_KXM * LOG2E, jnp.inf)
