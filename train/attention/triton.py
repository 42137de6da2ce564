"""`train_attention` and its gradient in Pallas for GPUs, lowered through Triton.

Source: FlashAttention-2, algorithms 1 and 2 (arXiv 2307.08691), over FlashMask's tiles (arXiv 2410.01359). Three
kernels: the output, by blocks of rows; the queries' gradient, by blocks of rows; the keys' and values' gradients, by
blocks of keys, over the row blocks that see them and the query heads of their group. Each sum is one program's own, so
results are the same in every run. Exponentials are powers of two, which is what the GPU computes.

The lowering is chosen by `pltriton.CompilerParams`, never by default: the default differs between versions of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ragjax.kernels.attention.triton import LOG2E, dot
from ragjax.kernels.device import Device
from train.attention.mask import Mask, Tiles, Tokens, visible

MOST_ROWS = 64
"""Rows that meet a block of keys at once in their gradient's kernel, which holds two sums: more spill registers."""

Arrays = tuple[jax.Array, ...]


def refusal(q_THD: jax.Array, mask: Mask, device: Device) -> str | None:
    """Why these kernels cannot serve the call on this device, or None."""
    if lack := device.lacks((8, 0)):
        return lack
    if q_THD.shape[-1] not in (64, 128):
        return f"head dimension {q_THD.shape[-1]} is neither 64 nor 128"
    for block in (mask.block_rows, mask.block_keys):
        if block not in (16, 32, 64, 128):
            return f"blocks of {block} tokens are not of 16, 32, 64 or 128"
    return device.lacks_shared(shared_bytes(q_THD, mask))


def shared_bytes(q_THD: jax.Array, mask: Mask) -> int:
    """Shared memory that a program of any of the kernels takes, at most."""
    dim, size = q_THD.shape[-1], q_THD.dtype.itemsize
    rows, keys, fewer = mask.block_rows, mask.block_keys, min(mask.block_rows, MOST_ROWS)
    queries = 2 * (rows + keys) * dim * size + rows * keys * size + 16 * keys
    return max(queries, 2 * (fewer + keys) * dim * size + 2 * fewer * keys * size + 16 * fewer)


def forward(
    q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, mask: Mask, scale: float, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """See `op.Backend`; `interpret` runs the kernel on a CPU."""
    specs = _Specs(q_THD, k_TKD, mask)
    out_THD, lse_HT = pl.pallas_call(
        functools.partial(_forward_kernel, scale=scale, block_keys=mask.block_keys),
        grid=specs.row_grid,
        in_specs=[specs.rows, specs.all_keys, specs.all_keys, *specs.by_rows],
        out_specs=[specs.rows, specs.row_values],
        out_shape=[
            jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype),
            jax.ShapeDtypeStruct((q_THD.shape[1], q_THD.shape[0]), jnp.float32),
        ],
        compiler_params=specs.row_params,
        interpret=interpret,
        name="train_attention",
    )(q_THD, k_TKD, v_TKD, *_lists(mask.by_rows), _pack(mask.tokens))
    return out_THD, lse_HT.T


def backward(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    mask: Mask,
    scale: float,
    dout_THD: jax.Array,
    lse_TH: jax.Array,
    delta_TH: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `op.Backend`; `interpret` runs the kernels on a CPU."""
    specs = _Specs(q_THD, k_TKD, mask)
    arrays = (q_THD, dout_THD, lse_TH.T, delta_TH.T, k_TKD, v_TKD)
    tokens_4T = _pack(mask.tokens)
    dq_THD = pl.pallas_call(
        functools.partial(_rows_kernel, scale=scale, block_keys=mask.block_keys),
        grid=specs.row_grid,
        in_specs=[*[specs.rows] * 2, *[specs.row_values] * 2, *[specs.all_keys] * 2, *specs.by_rows],
        out_specs=specs.rows,
        out_shape=jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype),
        compiler_params=specs.row_params,
        interpret=interpret,
        name="train_attention_dq",
    )(*arrays, *_lists(mask.by_rows), tokens_4T)
    dk_TKD, dv_TKD = pl.pallas_call(
        functools.partial(_keys_kernel, scale=scale, block_rows=mask.block_rows),
        grid=specs.key_grid,
        in_specs=[*[specs.all_rows] * 2, *[specs.all_values] * 2, *[specs.keys] * 2, *specs.by_keys],
        out_specs=[specs.keys, specs.keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_TKD, v_TKD)],
        compiler_params=specs.key_params,
        interpret=interpret,
        name="train_attention_dkv",
    )(*arrays, *_lists(mask.by_keys), tokens_4T)
    return dq_THD, dk_TKD, dv_TKD


class _Specs:
    """Block specs of the programs: a block of one head, or all tokens of a head."""

    def __init__(self, q_THD: jax.Array, k_TKD: jax.Array, mask: Mask) -> None:
        t, heads, dim = q_THD.shape
        kv_heads, group = k_TKD.shape[1], heads // k_TKD.shape[1]
        row_blocks, key_blocks = mask.by_rows.block_NS.shape
        self.row_grid, self.key_grid = (row_blocks, heads), (key_blocks, kv_heads)

        def own(n: Any) -> Any:  # the last rows, which see most, start first
            return row_blocks - 1 - n

        tokens = pl.BlockSpec((4, t), lambda *_: (0, 0))
        self.rows = pl.BlockSpec((mask.block_rows, None, dim), lambda n, h: (own(n), h, 0))
        self.row_values = pl.BlockSpec((None, mask.block_rows), lambda n, h: (h, own(n)))
        self.all_keys = pl.BlockSpec((t, None, dim), lambda n, h: (0, h // group, 0))
        self.by_rows = (
            pl.BlockSpec((None, key_blocks), lambda n, h: (own(n), 0)),
            pl.BlockSpec((None, 3), lambda n, h: (own(n), 0)),
            tokens,
        )
        self.keys = pl.BlockSpec((mask.block_keys, None, dim), lambda s, k: (s, k, 0))
        self.all_rows = pl.BlockSpec((t, group, dim), lambda s, k: (0, k, 0))
        self.all_values = pl.BlockSpec((group, t), lambda s, k: (k, 0))
        self.by_keys = (
            pl.BlockSpec((None, row_blocks), lambda s, k: (s, 0)),
            pl.BlockSpec((None, 3), lambda s, k: (s, 0)),
            tokens,
        )
        # In bfloat16, compiled for sm_90, none of the kernels spills a register with these. Float32 takes twice the
        # shared memory, of which a second stage would leave nothing.
        stages = 1 if q_THD.dtype == jnp.float32 else 2
        row_warps, key_warps = 8 if mask.block_rows == 128 else 4, 8 if dim == 128 else 4
        self.row_params = pltriton.CompilerParams(num_warps=row_warps, num_stages=stages)
        self.key_params = pltriton.CompilerParams(num_warps=key_warps, num_stages=stages)


def _lists(tiles: Tiles) -> Arrays:
    """The lists, and for each block its number, and how many of its items are seen whole and at all."""
    number_N = jnp.arange(tiles.count_N.shape[0], dtype=jnp.int32)
    return tiles.block_NS, jnp.stack([number_N, tiles.full_N, tiles.count_N], axis=1)


def _pack(tokens: Tokens) -> jax.Array:
    return jnp.stack([tokens.index_T, tokens.request_T, tokens.hide_from_T, tokens.hide_until_T])


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, list_ref: Any, extent_ref: Any, tokens_ref: Any, out_ref: Any, lse_ref: Any,
    *, scale: float, block_keys: int,
) -> None:  # fmt: skip
    """Online softmax of a block of rows of one query head; logits are in powers of two."""
    q_BD = q_ref[...]

    def visit(s: jax.Array, carry: Arrays, *, masked: bool) -> Arrays:
        acc_BD, max_B, sum_B = carry
        here = pl.ds(s * block_keys, block_keys)
        logits_BC = scale * LOG2E * dot(q_BD, k_ref[here, :], trans_b=True)
        if masked:
            seen_BC = _seen(tokens_ref, extent_ref[0], s, logits_BC.shape, rows_axis=0)
            logits_BC = jnp.where(seen_BC, logits_BC, -jnp.inf)
        new_B = jnp.maximum(max_B, logits_BC.max(1))
        safe_B = jnp.where(new_B == -jnp.inf, 0.0, new_B)
        prob_BC = jnp.exp2(logits_BC - safe_B[:, None])
        decay_B = jnp.exp2(max_B - safe_B)
        gain_BD = dot(prob_BC.astype(v_ref.dtype), v_ref[here, :])
        return acc_BD * decay_B[:, None] + gain_BD, new_B, sum_B * decay_B + prob_BC.sum(1)

    rows_shape = q_BD.shape[:1]
    start = (
        jnp.zeros(q_BD.shape, jnp.float32),
        jnp.full(rows_shape, -jnp.inf, jnp.float32),
        jnp.zeros(rows_shape, jnp.float32),
    )
    acc_BD, max_B, sum_B = _sweep(list_ref, extent_ref, visit, start)
    dead_B = sum_B == 0.0
    safe_B = jnp.where(dead_B, 1.0, sum_B)
    out_ref[...] = (acc_BD / safe_B[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(dead_B, -jnp.inf, (max_B + jnp.log2(safe_B)) / LOG2E)


def _rows_kernel(
    q_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any,
    list_ref: Any, extent_ref: Any, tokens_ref: Any, dq_ref: Any,
    *, scale: float, block_keys: int,
) -> None:  # fmt: skip
    """Gradient of a block of rows of one query head."""
    q_BD, dout_BD, delta_B1 = q_ref[...], dout_ref[...], delta_ref[...][:, None]
    lse_B1 = (LOG2E * lse_ref[...])[:, None]

    def visit(s: jax.Array, dq_BD: jax.Array, *, masked: bool) -> jax.Array:
        here = pl.ds(s * block_keys, block_keys)
        k_CD = k_ref[here, :]
        prob_BC = jnp.exp2(scale * LOG2E * dot(q_BD, k_CD, trans_b=True) - lse_B1)
        if masked:
            seen_BC = _seen(tokens_ref, extent_ref[0], s, prob_BC.shape, rows_axis=0)
            prob_BC = jnp.where(seen_BC, prob_BC, 0.0)
        slope_BC = prob_BC * (dot(dout_BD, v_ref[here, :], trans_b=True) - delta_B1)
        return dq_BD + dot(slope_BC.astype(k_CD.dtype), k_CD)

    dq_BD = _sweep(list_ref, extent_ref, visit, jnp.zeros(q_BD.shape, jnp.float32))
    dq_ref[...] = (scale * dq_BD).astype(dq_ref.dtype)


def _keys_kernel(
    q_ref: Any, dout_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any,
    list_ref: Any, extent_ref: Any, tokens_ref: Any, dk_ref: Any, dv_ref: Any,
    *, scale: float, block_rows: int,
) -> None:  # fmt: skip
    """Gradients of a block of keys and values of one KV head, over the heads of its group; keys lie along axis 0."""
    k_CD, v_CD = k_ref[...], v_ref[...]
    size = min(block_rows, MOST_ROWS)

    def head(g: jax.Array, sums: Arrays) -> Arrays:
        def visit(n: jax.Array, carry: Arrays, *, masked: bool) -> Arrays:
            dk_CD, dv_CD = carry
            here = pl.ds(n * size, size)
            q_BD, dout_BD = q_ref[here, g, :], dout_ref[here, g, :]
            lse_1B, delta_1B = (LOG2E * lse_ref[g, here])[None, :], delta_ref[g, here][None, :]
            prob_CB = jnp.exp2(scale * LOG2E * dot(k_CD, q_BD, trans_b=True) - lse_1B)
            if masked:
                seen_CB = _seen(tokens_ref, extent_ref[0], n, prob_CB.shape, rows_axis=1)
                prob_CB = jnp.where(seen_CB, prob_CB, 0.0)
            slope_CB = prob_CB * (dot(v_CD, dout_BD, trans_b=True) - delta_1B)
            return (dk_CD + dot(slope_CB.astype(q_BD.dtype), q_BD), dv_CD + dot(prob_CB.astype(dout_BD.dtype), dout_BD))

        summed: Arrays = _sweep(list_ref, extent_ref, visit, sums, parts=block_rows // size)
        return summed

    zero_CD = jnp.zeros(k_CD.shape, jnp.float32)
    dk_CD, dv_CD = lax.fori_loop(0, q_ref.shape[1], head, (zero_CD, zero_CD))
    dk_ref[...] = (scale * dk_CD).astype(dk_ref.dtype)
    dv_ref[...] = dv_CD.astype(dv_ref.dtype)


def _sweep(list_ref: Any, extent_ref: Any, visit: Callable[..., Any], carry: Any, *, parts: int = 1) -> Any:
    """Run `visit(part, carry, masked=)` over the parts of listed blocks: those seen whole, then those seen in part."""

    def step(item: jax.Array, carry: Any, *, masked: bool) -> Any:
        block, part = lax.div(item, jnp.int32(parts)), lax.rem(item, jnp.int32(parts))
        return visit(list_ref[block] * parts + part, carry, masked=masked)

    full, count = extent_ref[1] * parts, extent_ref[2] * parts
    carry = lax.fori_loop(0, full, functools.partial(step, masked=False), carry)
    return lax.fori_loop(full, count, functools.partial(step, masked=True), carry)


def _seen(tokens_ref: Any, first: jax.Array, second: jax.Array, shape: tuple[int, ...], *, rows_axis: int) -> jax.Array:
    """Visibility in a tile: block `first` lies along axis 0, block `second` along axis 1.

    The tokens' numbers are loaded again for each tile: to keep them costs as many registers as it saves loads.
    """
    along0, along1 = (
        Tokens(*(tokens_ref[i, pl.ds(block * size, size)] for i in range(4)))
        for block, size in zip((first, second), shape, strict=True)
    )
    tile = jax.tree.map(lambda x: x[:, None], along0), jax.tree.map(lambda x: x[None, :], along1)
    return visible(*tile) if rows_axis == 0 else visible(*reversed(tile))
