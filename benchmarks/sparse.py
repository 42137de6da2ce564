"""Blockwise attention in XLA beside dense attention on this machine, under a dependency tree that hides most pairs.

Time at 4K rows, and the memory of one call from 4K to 32K rows, where dense attention would need a mask of n x n.
Geometry of SmolLM2-135M: 9 query heads, 3 KV heads, head dimension 64.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.report import Benchmark, Session
from benchmarks.kernels import masks
from benchmarks.kernels.masks import Mask
from ragjax.kernels.attention.op import paged_interval_attention
from ragjax.kernels.pages import Pages, to_storage
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import visible
from ragjax.kernels.view import View

HEADS, KV_HEADS, DIM, PAGE_SIZE, BLOCK_ROWS = 9, 3, 64, 64, 128
SCALE = DIM**-0.5
COLUMNS = ("case", "backend", "dtype", "rows", "visible_share", "ms", "peer", "ratio", "error", "temp_mb", "total_mb")


def tree(rows: int) -> Mask:
    """Segments of 24 to 80 tokens, of which a token sees its own and its ancestors; a tenth of the pairs at 4K rows."""
    return masks.tree(rows, low=24, high=80, join=64, deepest=4)


def view_of(mask: Mask, dtype: str) -> View:
    total = len(mask.index_N) // PAGE_SIZE
    pages = masks.random_pages(jax.random.key(1), total, PAGE_SIZE, KV_HEADS, DIM, "float32")
    stored = jnp.dtype("uint16" if dtype == "bfloat16" else dtype)
    pages = Pages(to_storage(pages.k_LPKCD, stored), to_storage(pages.v_LPKCD, stored))
    table = Rotation(jnp.ones((1, DIM // 2)), jnp.zeros((1, DIM // 2)))  # nothing is moved
    return masks.view_of(mask, pages, table, SCALE, BLOCK_ROWS)


@partial(jax.jit, static_argnames="block_rows")
def blockwise(q_THD: jax.Array, view: View, block_rows: int = BLOCK_ROWS) -> jax.Array:
    made = View.build(
        view.rows, view.pages, view.layer, view.entries, view.rotation, scale=SCALE, block_rows=block_rows
    )
    return paged_interval_attention(q_THD, made)[0]


@jax.jit
def dense(q_THD: jax.Array, k_TKD: jax.Array, v_TKD: jax.Array, seen_TT: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_THD[None], k_TKD[None], v_TKD[None], mask=seen_TT[None, None], scale=SCALE)[0]


def contiguous(view: View, dtype: str) -> tuple[jax.Array, jax.Array]:
    def gathered(pool: jax.Array) -> jax.Array:
        x = pool[0][view.entries.page_S].swapaxes(1, 2).reshape(-1, KV_HEADS, DIM)
        return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if dtype == "bfloat16" else x

    return gathered(view.pages.k_LPKCD), gathered(view.pages.v_LPKCD)


def timed(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Milliseconds of each call, medians over rounds in which all take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(rounds):
        for samples, call in zip(found, calls, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            samples.append((time.perf_counter() - start) * 1e3)
    return [float(np.median(samples)) for samples in found]


def compare(rows: int, dtype: str, rounds: int) -> dict[str, Any]:
    mask = tree(rows)
    view = view_of(mask, dtype)
    q = jax.random.normal(jax.random.key(0), (rows, HEADS, DIM))
    keys, values = contiguous(view, dtype)
    order = jnp.argsort(view.entries.index_SC.reshape(-1))
    seen = visible(view.rows, view.entries).reshape(rows, -1)[:, order]
    cast = q.astype(keys.dtype)

    def ours() -> Any:
        return blockwise(q, view)

    def theirs() -> Any:
        return dense(cast, keys[order], values[order], seen)

    expected = np.asarray(theirs().astype(jnp.float32)).astype(np.float64)
    difference = np.asarray(ours()).astype(np.float64) - expected
    ms, dense_ms = timed([ours, theirs], rounds)
    return {
        "case": "tree", "backend": "xla", "dtype": dtype, "head_dim": DIM, "rows": rows, "keys": rows,
        "visible_share": masks.visible_pairs(mask) / (rows * (rows + 1) / 2), "ms": ms,
        "tflops": 4 * masks.visible_pairs(mask) * DIM * HEADS / ms / 1e9, "peer": "dense", "ratio": dense_ms / ms,
        "error": float(np.linalg.norm(difference) / np.linalg.norm(expected)),
    }  # fmt: skip


def memory(rows: int, dtype: str) -> dict[str, Any]:
    """Memory of a call, arguments and result included, as the compiler plans it."""
    view = view_of(tree(rows), dtype)
    q = jax.ShapeDtypeStruct((rows, HEADS, DIM), jnp.float32)
    plan: Any = blockwise.lower(q, view).compile().memory_analysis()
    total = plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes
    return {
        "case": "memory", "backend": "xla", "dtype": dtype, "head_dim": DIM, "rows": rows, "keys": rows,
        "temp_mb": plan.temp_size_in_bytes / 1e6, "total_mb": total / 1e6, "peer": "n x n booleans",
        "ratio": rows * rows / 1e6 / (total / 1e6),
    }  # fmt: skip


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    quick = chosen.quick
    for dtype in ("float32", "bfloat16"):
        yield compare(1024 if quick else 4096, dtype, 3 if quick else 7)
        for rows in (1024, 2048) if quick else (4096, 8192, 16384, 32768):
            yield memory(rows, dtype)


main = Benchmark("sparse", __doc__, COLUMNS, measure).main

if __name__ == "__main__":
    sys.exit(main())
