"""`paged_interval_attention` for decode in Triton's own language, called through jax-triton.

The program itself is `jax_triton_kernel.py`; it and jax-triton are imported when they are first called for: this
module can be imported where neither triton nor a GPU is at hand.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from ragjax.core import NEVER
from ragjax.kernels.attention.split import deepest, merge_splits, shared_bytes, splits
from ragjax.kernels.device import Device
from ragjax.kernels.view import View

MOST_ROWS = 32
"""Folded rows (block_rows x query heads of a KV head) of a program at most: this kernel is shaped for decode."""

LEAST_ROWS = 16
"""Rows that a tensor core takes at least; the rest is padding."""

TILE_BYTES = 16 * 1024
"""Bytes of a tile of keys at most, so that three stages of keys and values fit in shared memory twice."""


@dataclass(frozen=True)
class Launch:
    """Launch parameters of the program."""

    grid: tuple[int, int, int]  # row blocks, KV heads, splits of a list
    rows: int  # folded rows with padding (M of the program)
    tile: int  # slots of a tile (N of the program)
    stages: int  # of Triton's pipeline
    warps: int = 4

    @staticmethod
    def of(q_THD: jax.Array, view: View, device: Device) -> Launch:
        t, heads, dim = q_THD.shape
        pool = view.pages.k_LPKCD
        kv_heads, slots = pool.shape[2], pool.shape[3]
        blocks = t // view.block_rows
        parts = splits(blocks * kv_heads, view.entries.request_S.shape[0])
        rows = LEAST_ROWS if view.block_rows * (heads // kv_heads) <= LEAST_ROWS else MOST_ROWS
        tile = min(slots, TILE_BYTES // (dim * pool.dtype.itemsize))
        stages = deepest(partial(shared_bytes, rows, tile, pool, device), device)
        return Launch((blocks, kv_heads, parts), rows, tile, stages)


def refusal(q_THD: jax.Array, view: View, device: Device) -> str | None:
    """Why this kernel cannot serve the call on this device, or None."""
    _, _, kv_heads, slots, dim = view.pages.k_LPKCD.shape
    folded = view.block_rows * (q_THD.shape[1] // kv_heads)
    if lack := device.lacks((8, 0)):
        return lack
    if view.cap is not None:
        return "logits are capped, which XLA alone computes"
    if folded > MOST_ROWS:
        return f"{folded} rows share a KV head in a block; it decodes, with at most {MOST_ROWS}"
    if dim not in (64, 128):
        return f"head dimension {dim} is neither 64 nor 128"
    if slots < 16 or slots & (slots - 1):
        return f"pages of {slots} slots are not of a power of two from 16 up"
    if view.pages.k_LPKCD.dtype == jnp.uint16:
        return "pages of bfloat16 bits (uint16) are for CPUs"
    launch = Launch.of(q_THD, view, device)
    need = shared_bytes(launch.rows, launch.tile, view.pages.k_LPKCD, device, launch.stages)
    return device.lacks_shared(need) or _absent()


def _absent() -> str | None:
    """Why jax-triton cannot be imported, or None."""
    try:
        _jax_triton()
        importlib.import_module("triton")
    except Exception as error:  # whatever an extra of another version raises: dispatch is to go on without it
        first, *_ = str(error).splitlines() or [""]
        return f"jax-triton is not usable ({type(error).__name__}: {first}); install ragjax[cuda12] or ragjax[cuda13]"
    return None


def _jax_triton() -> ModuleType:
    """The package, imported; it empties an environment variable that other users of Triton need, which is put back."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept


def attend(q_THD: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
    """See `op.paged_interval_attention`. Raises ImportError where jax-triton is not installed."""
    from benchmarks.baseline.attention.jax_triton_kernel import decode

    launch = Launch.of(q_THD, view, Device.of(jax.devices()[0]))
    shape = (launch.grid[2], *q_THD.shape)
    out_JTHD, lse_JTH = _jax_triton().triton_call(
        *arguments(q_THD, view),
        kernel=decode,
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)),
        grid=launch.grid,
        name="paged_interval_attention_decode",
        num_warps=launch.warps,
        num_stages=launch.stages,
        **constants(q_THD, view, launch),
    )
    out_THD, lse_TH = merge_splits(out_JTHD, lse_JTH)
    return out_THD.astype(q_THD.dtype), lse_TH


def arguments(q_THD: jax.Array, view: View) -> tuple[jax.Array, ...]:
    """The arrays whose addresses the program gets, in its order; its outputs follow them.

    Pages are listed beside entries, to be one load away instead of two: Triton would not buffer them twice otherwise.
    """
    pages, entries, blocks, rotation = view.pages, view.entries, view.blocks, view.rotation
    return (
        q_THD, view.rows.index_T, pages.k_LPKCD, pages.v_LPKCD, jnp.asarray(view.layer, jnp.int32).reshape(1),
        blocks.entry_NS, entries.page_S[blocks.entry_NS], blocks.count_N, blocks.partial_NU, blocks.end_NU,
        entries.offset_S, entries.index_SC, entries.hide_from_SC, entries.hide_until_SC,
        rotation.cos_NR, rotation.sin_NR,
    )  # fmt: skip


def constants(q_THD: jax.Array, view: View, launch: Launch) -> dict[str, Any]:
    """The program's compile-time arguments by name."""
    _, pages, kv_heads, slots, dim = view.pages.k_LPKCD.shape
    return {
        "SCALE": view.scale * math.log2(math.e),
        "NEVER": int(NEVER),
        # by default a float32 product would be TF32
        "PRECISION": "ieee" if view.pages.k_LPKCD.dtype == jnp.float32 else "tf32",
        "BLOCK_ROWS": view.block_rows,
        "GROUPS": q_THD.shape[1] // kv_heads,
        "KV_HEADS": kv_heads,
        "PAGES": pages,
        "PAGE_SIZE": slots,
        "DIM": dim,
        "ENTRIES": view.entries.request_S.shape[0],
        "M": launch.rows,
        "N": launch.tile,
    }
