"""`paged_interval_attention` in Pallas for GPUs, lowered through Triton: prefill, selective recompute and decode.

Sources: online softmax as in FlashAttention-2 (arXiv 2307.08691), split-KV as in Flash-Decoding, tiles left out or left
unmasked as in FlashMask (arXiv 2410.01359). One program serves one KV head and a block of rows; the query heads of a
group are folded into its rows, so that a page is read once for all of them. It walks its block's list run by run: a
run has one RoPE offset, by which the query is rotated back once, and no page is ever copied or rewritten. Few programs
are made more by splitting the list; the parts merge by their log-sum-exp.

The lowering is chosen by `pltriton.CompilerParams`, never by default: the default differs between versions of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ragjax.core import NEVER
from ragjax.kernels.attention.split import deepest, merge_splits, shared_bytes, splits
from ragjax.kernels.device import Device
from ragjax.kernels.table import sees
from ragjax.kernels.view import View

LOG2E = 1.4426950408889634

MOST_ROWS = 128
"""Folded rows of a program at most: more of them spill registers."""

LEAST_ROWS = 16
"""Folded rows of a program at least: tensor cores take no fewer."""

SPREAD = 4
"""Rows in blocks of one decode, one for each request. About one in so many is in use; the others are padding, whose
lists are empty: lists are split as if there were that many fewer programs.
"""

TILE = 64 * 128 * 2
"""Bytes of a page of one KV head that registers and shared memory are best used with: 64 slots of 128 in bfloat16."""

State = tuple[jax.Array, jax.Array, jax.Array]
Halves = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Tiling:
    rows: int  # folded rows of a program (M)
    groups: int  # query heads of a KV head with padding
    parts: int  # programs of a row block
    splits: int  # programs that share a list
    warps: int
    stages: int  # of Triton's pipeline


def tiling(q_THD: jax.Array, view: View, device: Device) -> Tiling:
    """The cut for these shapes; tests/test_compile.py holds it to what registers and shared memory allow."""
    t, heads, dim = q_THD.shape
    _, _, kv_heads, slots, _ = view.pages.k_LPKCD.shape
    groups = max(pl.next_power_of_2(heads // kv_heads), LEAST_ROWS // view.block_rows)
    folded = groups * view.block_rows
    tile = slots * dim * view.pages.k_LPKCD.dtype.itemsize
    rows = min(folded, MOST_ROWS if tile <= TILE else MOST_ROWS // 2 if tile <= 2 * TILE else LEAST_ROWS)
    programs = t // view.block_rows * (folded // rows) * kv_heads
    busy = -(-programs // SPREAD) if view.block_rows == 1 else programs
    need = functools.partial(shared_bytes, rows, slots, view.pages.k_LPKCD, device)
    return Tiling(
        rows=rows,
        groups=groups,
        parts=folded // rows,
        splits=splits(busy, view.entries.request_S.shape[0]),
        warps=8 if rows >= 64 or tile > TILE else 4,
        stages=deepest(need, device),
    )


def refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    _, _, _, slots, dim = view.pages.k_LPKCD.shape
    if lack := device.lacks((8, 0)):
        return lack
    if view.cap is not None:
        return "logits are capped, which XLA alone computes"
    if dim not in (64, 128):
        return f"head dimension {dim} is neither 64 nor 128"
    if slots < 16 or slots & (slots - 1) or slots > 128:
        return f"pages of {slots} slots are not of 16, 32, 64 or 128"
    if view.block_rows & (view.block_rows - 1):
        return f"row blocks of {view.block_rows} are not a power of two"
    if view.pages.k_LPKCD.dtype == jnp.uint16:
        return "pages of bfloat16 bits (uint16) are for CPUs"
    cut = tiling(q_THD, view, device)
    return device.lacks_shared(shared_bytes(cut.rows, slots, view.pages.k_LPKCD, device, cut.stages))


def attend(
    q_THD: jax.Array, view: View, *, cut: Tiling | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `op.paged_interval_attention`; `cut` overrides `tiling`, `interpret` runs the kernel on a CPU."""
    pages, entries, blocks, rotation = view.pages, view.entries, view.blocks, view.rotation
    cut = cut or tiling(q_THD, view, Device.of(jax.devices()[0]))
    layers, pool, kv_heads, slots, dim = pages.k_LPKCD.shape
    q_KXMD = fold(q_THD, kv_heads, cut)
    programs = q_KXMD.shape[1]
    index_XM = jnp.repeat(view.rows.index_T, cut.groups).reshape(programs, cut.rows)
    extent_N2 = jnp.stack([blocks.runs_N, blocks.count_N], axis=1)

    def own(x: Any, *_: Any) -> Any:  # the last rows, which see most, start first
        return programs - 1 - x

    listed = part(lambda x, *_: own(x) // cut.parts)
    pool_spec = pl.BlockSpec((layers, pool, None, slots, dim), lambda x, k, j: (0, 0, k, 0, 0))
    shared = (
        entries.page_S, entries.offset_S, entries.index_SC, entries.hide_from_SC,
        entries.hide_until_SC,
        rotation.cos_NR, rotation.sin_NR, jnp.asarray(view.layer, jnp.int32).reshape(1),
    )  # fmt: skip
    lists = (blocks.entry_NS, blocks.partial_NU, blocks.end_NU, extent_N2)
    out_dtype = q_THD.dtype if cut.splits == 1 else jnp.float32
    out_JKXMD, lse_JKXM = pl.pallas_call(
        functools.partial(_kernel, scale=view.scale * LOG2E, splits=cut.splits),
        grid=(programs, kv_heads, cut.splits),
        in_specs=[
            part(lambda x, k, j: k, own)(cut.rows, dim),
            part(own)(cut.rows),
            pool_spec,
            pool_spec,
            *(listed(x.shape[1]) for x in lists),
            *(part()(*x.shape) for x in shared),
        ],
        out_specs=[part(lambda x, k, j: j, lambda x, k, j: k, own)(*shape) for shape in ((cut.rows, dim), (cut.rows,))],
        out_shape=[
            jax.ShapeDtypeStruct((cut.splits, *q_KXMD.shape), out_dtype),
            jax.ShapeDtypeStruct((cut.splits, *q_KXMD.shape[:-1]), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="paged_interval_attention",
    )(q_KXMD, index_XM, pages.k_LPKCD, pages.v_LPKCD, *lists, *shared)
    out_KXMD, lse_KXM = merge_splits(out_JKXMD, lse_JKXM)
    heads = q_THD.shape[1]
    return unfold(out_KXMD, heads, cut).astype(q_THD.dtype), unfold(lse_KXM[..., None], heads, cut)[..., 0]


def _kernel(
    q_ref: Any, index_ref: Any, k_ref: Any, v_ref: Any, entry_ref: Any, partial_ref: Any, end_ref: Any, extent_ref: Any,
    page_ref: Any, offset_ref: Any, key_index_ref: Any, hide_from_ref: Any, hide_until_ref: Any,
    cos_ref: Any, sin_ref: Any, layer_ref: Any, out_ref: Any, lse_ref: Any, *, scale: float, splits: int,
) -> None:  # fmt: skip
    """One program: rows [M, D] of one KV head over its share of their list. Heads are handled as two halves, because
    Triton cannot cut a tile.
    """
    rows, dim = q_ref.shape
    half = dim // 2
    index_M1 = index_ref[...][:, None]
    layer = layer_ref[0]
    dtype = k_ref.dtype

    def rotated(offset: jax.Array) -> Halves:
        q1_MR, q2_MR = (q_ref[:, pl.ds(begin, half)].astype(jnp.float32) * scale for begin in (0, half))
        return rotate_halves(q1_MR, q2_MR, cos_ref, sin_ref, -offset, dtype)

    def visit(item: jax.Array, state: State, q_MR: Halves, masked: bool) -> State:
        acc_MD, max_M, sum_M = state
        entry = entry_ref[item]
        page = page_ref[entry]
        logits_MC = dot(q_MR[0], k_ref[layer, page, :, pl.ds(0, half)], trans_b=True)
        logits_MC += dot(q_MR[1], k_ref[layer, page, :, pl.ds(half, half)], trans_b=True)
        v_CD = v_ref[layer, page, :, :]
        if masked:
            index_C, from_C, until_C = key_index_ref[entry, :], hide_from_ref[entry, :], hide_until_ref[entry, :]
            logits_MC = jnp.where(sees(index_M1, index_C[None], from_C[None], until_C[None]), logits_MC, -jnp.inf)
            # slots nobody may ever see can hold NaN, and 0 * NaN is NaN
            dead_C = (index_C >= NEVER) | ((from_C <= index_C) & (until_C >= NEVER))
            v_CD = jnp.where(dead_C[:, None], jnp.zeros((), dtype), v_CD)
        new_M = jnp.maximum(max_M, logits_MC.max(axis=1))
        safe_M = jnp.where(new_M == -jnp.inf, 0.0, new_M) if masked else new_M
        decay_M = jnp.exp2(max_M - safe_M)
        prob_MC = jnp.exp2(logits_MC - safe_M[:, None])
        acc_MD = acc_MD * decay_M[:, None] + dot(prob_MC.astype(dtype), v_CD)
        return acc_MD, new_M, sum_M * decay_M + prob_MC.sum(axis=1)

    runs, count = extent_ref[0], extent_ref[1]
    share = (count + splits - 1) // splits
    low = pl.program_id(2) * share
    high = jnp.minimum(low + share, count)
    mine, beyond, here = jnp.int32(0), runs, jnp.int32(0)
    if splits > 1:  # each run costs a rotation, so those of other programs are left out
        mine = runs_ended(end_ref, runs, low)
        here = jnp.where(mine > 0, end_ref[jnp.maximum(mine - 1, 0)], 0)
        beyond = jnp.minimum(runs_ended(end_ref, runs, high - 1) + 1, runs)

    def run(u: jax.Array, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        begin, state = carry
        partial, end = partial_ref[u], end_ref[u]
        q_MR = rotated(offset_ref[entry_ref[begin]])
        for first, last, masked in ((begin, partial, False), (partial, end, True)):
            step = functools.partial(visit, q_MR=q_MR, masked=masked)
            state = lax.fori_loop(jnp.maximum(first, low), jnp.minimum(last, high), step, state)
        return end, state

    start = jnp.zeros((rows, dim), jnp.float32), jnp.full((rows,), -jnp.inf), jnp.zeros((rows,), jnp.float32)
    _, (acc_MD, max_M, sum_M) = lax.fori_loop(mine, beyond, run, (here, start))
    dead_M = (sum_M == 0.0) | (index_ref[...] < 0)
    safe_M = jnp.where(dead_M, 1.0, sum_M)
    out_ref[...] = jnp.where(dead_M[:, None], 0.0, acc_MD / safe_M[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(dead_M, -jnp.inf, (max_M + jnp.log2(safe_M)) / LOG2E)


def part(*places: Callable[..., Any]) -> Callable[..., pl.BlockSpec]:
    """Specs of the part of an array that a program sees: one place of each of the first axes, the whole of others.

    places: each from the program's numbers.
    """

    def spec(*shape: int) -> pl.BlockSpec:
        lead, rest = (None,) * len(places), (0,) * len(shape)
        return pl.BlockSpec((*lead, *shape), lambda *program: (*(place(*program) for place in places), *rest))

    return spec


def runs_ended(end_ref: Any, runs: jax.Array, item: jax.Array) -> jax.Array:
    """Within a kernel, how many of a list's runs end at or before an item, by bisection."""
    low: jax.Array = jnp.int32(0)
    high = runs
    for _ in range(end_ref.shape[0].bit_length()):
        middle = (low + high) // 2
        ended = (low < high) & (end_ref[jnp.minimum(middle, end_ref.shape[0] - 1)] <= item)
        low, high = jnp.where(ended, middle + 1, low), jnp.where(ended | (low >= high), high, middle)
    return low


def dot(x: jax.Array, y: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """Product within a kernel, accumulated in float32; float32 operands are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product: jax.Array = pltriton.dot(x, y, trans_b=trans_b, precision=precision)
    return product


def rotate_halves(
    x1: jax.Array, x2: jax.Array, cos_ref: Any, sin_ref: Any, offset: jax.Array, dtype: jnp.dtype
) -> Halves:
    """Within a kernel, two halves of heads, float32 [..., R] each, rotated by an offset of either sign; in dtype."""
    position = jnp.abs(offset)
    cos_1R, sin_1R = cos_ref[position, :][None], (jnp.sign(offset).astype(jnp.float32) * sin_ref[position, :])[None]
    return (x1 * cos_1R - x2 * sin_1R).astype(dtype), (x2 * cos_1R + x1 * sin_1R).astype(dtype)


def fold(x_THD: jax.Array, kv_heads: int, cut: Tiling) -> jax.Array:
    """[T, H, D] to [K, X, M, D], X programs of M rows each: the heads of a group beside one another, padded."""
    t, heads, dim = x_THD.shape
    x_TKGD = x_THD.reshape(t, kv_heads, heads // kv_heads, dim)
    x_TKGD = jnp.pad(x_TKGD, ((0, 0), (0, 0), (0, cut.groups - heads // kv_heads), (0, 0)))
    return x_TKGD.swapaxes(0, 1).reshape(kv_heads, -1, cut.rows, dim)


def unfold(x_KXMD: jax.Array, heads: int, cut: Tiling) -> jax.Array:
    kv_heads, _, _, dim = x_KXMD.shape
    x_KTGD = x_KXMD.reshape(kv_heads, -1, cut.groups, dim)[:, :, : heads // kv_heads]
    return x_KTGD.swapaxes(0, 1).reshape(-1, heads, dim)
