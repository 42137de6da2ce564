"""`paged_interval_attention` in Pallas Mosaic GPU, for prefill and selective recompute on Hopper.

Source: a producer warpgroup that copies by TMA and consumer warpgroups that multiply with wgmma, as in FlashAttention-3
(arXiv 2407.08608 §3.1), over the lists of `blocks.py`. The query heads of a KV head are folded into rows; a program
takes one or two tiles of 64 folded rows of one row block, a consumer warpgroup each, and its own copy of the walk
through the block's list. A query tile is rotated once a run of equal offset, in shared memory, where wgmma reads it.

This module is the call; `mosaic_memory.py` holds sizes, arrays, barriers and the producer warpgroup,
`mosaic_consumer.py` the consumers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ragjax.kernels.attention.mosaic_consumer import consume
from ragjax.kernels.attention.mosaic_memory import (
    TILE,
    KernelInputs,
    Program,
    Ref,
    Shared,
    Sizes,
    arguments,
    produce,
    scratch_of,
)
from ragjax.kernels.attention.split import splits
from ragjax.kernels.device import Device
from ragjax.kernels.view import View

DIMS = (64, 128)
PAGE_SIZES = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
QUERY_DTYPES = (jnp.float32, *DTYPES)


def refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    if lack := device.lacks((9, 0)):
        return lack
    if device.capability >= (10, 0):
        return f"wgmma needs compute capability 9.x, not {'.'.join(map(str, device.capability))}"
    return _unfit(q_THD, view)


def leads(q_THD: jax.Array, view: View, device: Device) -> bool:
    """True if this backend is the fastest for the call (docs/kernels.md): its programs fill the device.

    It does not split lists, so fewer programs would leave multiprocessors idle.
    """
    if refusal(q_THD, view, device) is not None:
        return False
    kv_heads = view.pages.k_LPKCD.shape[2]
    tiles = -(-view.block_rows * (q_THD.shape[1] // kv_heads) // (2 * TILE))
    programs = q_THD.shape[0] // view.block_rows * tiles * kv_heads
    return splits(programs, view.entries.request_S.shape[0]) == 1


def _unfit(q_THD: jax.Array, view: View) -> str | None:
    if view.cap is not None:
        return "logits are capped, which XLA alone computes"
    _, heads, dim = q_THD.shape
    _, _, kv_heads, slots, _ = view.pages.k_LPKCD.shape
    b, folded = view.block_rows, view.block_rows * (heads // kv_heads)
    for name, value, among in (
        ("head dim", dim, DIMS),
        ("page size", slots, PAGE_SIZES),
        ("pool dtype", view.pages.k_LPKCD.dtype, DTYPES),
        ("query dtype", q_THD.dtype, QUERY_DTYPES),
    ):
        if value not in among:
            return f"{name} {value} is none of {', '.join(jnp.dtype(x).name if callable(x) else str(x) for x in among)}"
    if b < 8 or (TILE % b and b % TILE):
        return f"block_rows {b} is neither 8, 16, 32 nor a multiple of {TILE}"
    if folded < TILE:
        return f"{b} rows x {heads // kv_heads} query heads a KV head do not fill the {TILE} rows of a wgmma"
    return None


def attend(q_THD: jax.Array, view: View, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """See `op.paged_interval_attention`.

    The pool is of bfloat16 or float16, in pages of 64 or 128 slots; blocks have 8, 16, 32 or a multiple of 64 rows, and
    fill at least 64 when the query heads of a KV head are folded into them; D is 64 or 128.
    interpret: run on CPU, in JAX's simulation of a GPU's memory and barriers (jax 0.11 and up).
    """
    reason = _unfit(q_THD, view)
    if reason is not None:
        raise ValueError(f"the mosaic backend cannot serve this call: {reason}")
    t, heads, dim = q_THD.shape
    _, pages, kv_heads, slots, _ = view.pages.k_LPKCD.shape
    dtypes = q_THD.dtype, view.pages.k_LPKCD.dtype
    sizes = Sizes(view.block_rows, heads, kv_heads, dim, slots, pages, *dtypes, view.scale, interpret)
    n, m = t // view.block_rows, sizes.programs * sizes.consumers * TILE
    more: dict[str, Any] = {}
    if interpret:  # JAX's module of it is not public in every supported version
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        more["interpret"] = InterpretGPUParams()
    kernel = plgpu.kernel(
        functools.partial(_kernel, sizes),
        out_type=(jax.ShapeDtypeStruct(q_THD.shape, q_THD.dtype), jax.ShapeDtypeStruct((n, kv_heads, m), jnp.float32)),
        scratch_types=scratch_of(sizes),
        # last axis first: programs side by side in time read much the same pages
        grid=(kv_heads, sizes.programs, n),
        grid_names=("kv_head", "program", "block"),
        num_threads=sizes.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **more,
    )
    out_THD, lse_NKM = kernel(*arguments(q_THD, view, m))
    lse_NKGB = lse_NKM[:, :, : sizes.group * view.block_rows].reshape(n, kv_heads, sizes.group, view.block_rows)
    return out_THD, lse_NKGB.transpose(0, 3, 1, 2).reshape(t, heads)


def _kernel(sizes: Sizes, *refs: Ref, **scratch: Ref) -> None:
    inputs, (out_THD, lse_NKM) = KernelInputs(*refs[:-2]), refs[-2:]
    shared = Shared(**scratch)
    last = jnp.int32(inputs.entry_NS.shape[0] - 1)
    # the last blocks first: as a rule they have the longest lists, and a sweep should end with short ones
    place = Program(last - lax.axis_index("block"), lax.axis_index("kv_head"))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < sizes.consumers)
    def _() -> None:
        if sizes.consumers == 2:
            plgpu.set_max_registers(240, action="increase")
        consume(sizes, inputs, shared, place, warpgroup, out_THD, lse_NKM)

    @pl.when(warpgroup == sizes.consumers)
    def _() -> None:
        if sizes.consumers == 2:
            plgpu.set_max_registers(24, action="decrease")
        produce(sizes, inputs, shared, place)
