"""Who sees whom in the prompts that attention is timed on, token by token, and the same laid out in pages.

Sizes: T rows, N keys (slots), S entries, C slots of a page.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from benchmarks.common.machine import ROOT
from ragjax.core import NEVER
from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View

Int = NDArray[np.int32]

ALIGN = 128  # chunks that are moved by an offset begin on pages of their own, of this many slots at most


@dataclass(frozen=True)
class Mask:
    """Rows and keys of one pass, int32. A key of order `NEVER` takes part nowhere; neither does a row of order -1.

    offset_N is equal within a page.
    """

    name: str
    index_T: Int
    request_T: Int
    index_N: Int
    request_N: Int
    hide_from_N: Int
    hide_until_N: Int
    offset_N: Int


def causal(n: int) -> Mask:
    order = np.arange(n, dtype=np.int32)
    zero = np.zeros(n, np.int32)
    return Mask("causal", order, zero, order, zero, zero, zero, zero)


def chunks(n: int, *, low: int = 256, high: int = 1024, join: int = 128, seed: int = 0) -> Mask:
    """A system prompt, chunks of `low` to `high` tokens that see it and themselves, a join that sees all."""
    mask = replace(causal(n), name="chunks")
    hide_from, hide_until = mask.hide_from_N.copy(), mask.hide_until_N.copy()
    for begin, end in list(_pieces(n - join, low, high, seed))[1:]:
        hide_from[begin:end], hide_until[begin:end] = end, n - join
    return replace(mask, hide_from_N=hide_from, hide_until_N=hide_until)


def tree(
    n: int, *, low: int = 256, high: int = 1024, join: int = 128, deepest: int = 6, seed: int = 0, name: str = "tree"
) -> Mask:
    """A dependency tree in pre-order, segments of `low` to `high` tokens that see their ancestors, and a join."""
    rng = np.random.default_rng(seed)
    pieces = list(_pieces(n - join, low, high, seed))
    depths = [0]
    for _ in pieces[1:]:
        depths.append(int(rng.integers(1, min(depths[-1] + 1, deepest) + 1)))
    mask = replace(causal(n), name=name)
    hide_from, hide_until = mask.hide_from_N.copy(), mask.hide_until_N.copy()
    open_pieces: list[int] = []
    for i in [*range(len(pieces)), len(pieces)]:
        depth, here = (depths[i], pieces[i][0]) if i < len(pieces) else (0, n - join)
        while open_pieces and depths[open_pieces[-1]] >= depth:  # the subtree of this piece ends here
            begin, end = pieces[open_pieces.pop()]
            hide_from[begin:end], hide_until[begin:end] = here, n - join
        open_pieces.append(i)
    return replace(mask, hide_from_N=hide_from, hide_until_N=hide_until)


def graph(n: int, *, seed: int = 0) -> Mask:
    """A tree of knowledge-graph paths: runs of 4 to 20 tokens."""
    return tree(n, low=4, high=20, deepest=8, seed=seed, name="graph")


def recompute(n: int, rows: int, *, moved: bool, low: int = 256, high: int = 1024, seed: int = 0) -> Mask:
    """`rows` of n tokens chosen at random, in order, over all n keys; `moved`: each chunk at an offset of its own."""
    mask = causal(n)
    chosen = np.random.default_rng(seed).choice(n, rows, replace=False) if rows < n else np.arange(n)
    order = np.sort(chosen).astype(np.int32)
    name = f"recompute-{'moved' if moved else 'in-place'}"
    offset = _offsets(n, low, high, seed) if moved else mask.offset_N
    return replace(mask, name=name, index_T=order, request_T=np.zeros(rows, np.int32), offset_N=offset)


def patched(n: int, rows: int, page: int, *, low: int = 256, high: int = 1024, seed: int = 0) -> Mask:
    """As `recompute`, moved, but the chosen tokens' cached keys are hidden; new ones are in pages behind the rest."""
    mask = recompute(n, rows, moved=True, low=low, high=high, seed=seed)
    fresh = -(-rows // page) * page

    def more(x: Int, new: Int | int) -> Int:
        tail = np.full(fresh, 0, np.int32)
        tail[:rows] = new
        return np.concatenate([x, tail])

    old = mask.index_N.copy()
    old[mask.index_T] = NEVER
    order = more(old, mask.index_T)
    order[n + rows :] = NEVER
    return Mask(
        "recompute-patched", mask.index_T, mask.request_T, order, more(mask.request_N, 0),
        more(mask.hide_from_N, 0), more(mask.hide_until_N, 0), more(mask.offset_N, 0),
    )  # fmt: skip


def decode(batch: int, context: int, *, moved: bool, low: int = 256, high: int = 1024) -> Mask:
    one = causal(context)
    offsets = [_offsets(context, low, high, seed) if moved else one.offset_N for seed in range(batch)]
    request = np.arange(batch, dtype=np.int32)
    zero = np.zeros(batch * context, np.int32)
    return Mask(
        f"decode-{'moved' if moved else 'in-place'}",
        np.full(batch, context - 1, np.int32), request, np.tile(one.index_N, batch), np.repeat(request, context),
        zero, zero, np.concatenate(offsets),
    )  # fmt: skip


def _pieces(n: int, low: int, high: int, seed: int, align: int = 1) -> Iterator[tuple[int, int]]:
    """[begin, end) of random pieces that cover n tokens; the last takes what would leave less than `low`."""
    rng = np.random.default_rng([seed, n])
    begin = 0
    while begin < n:
        length = -(-int(rng.integers(low, high + 1)) // align) * align
        end = n if n - begin - length < low else begin + length
        yield begin, end
        begin = end


def _offsets(n: int, low: int, high: int, seed: int) -> Int:
    """For each key how far its chunk was moved from where it was computed: right behind the first one."""
    pieces = list(_pieces(n, low, high, seed, ALIGN))
    offset = np.zeros(n, np.int32)
    for begin, end in pieces[1:]:
        offset[begin:end] = begin - pieces[0][1]
    return offset


def visible_pairs(mask: Mask) -> int:
    total = 0
    for request in np.unique(mask.request_T):
        rows, own = mask.index_T[mask.request_T == request], mask.request_N == request
        total += seen_pairs(rows[rows >= 0], mask.index_N[own], mask.hide_from_N[own], mask.hide_until_N[own])
    return total


def seen_pairs(index_T: Int, index_N: Int, hide_from_N: Int, hide_until_N: Int) -> int:
    """Pairs of a row and a key that it sees, of one request, counted key by key."""
    rows, live = np.sort(index_T), index_N < NEVER
    index, low, high = (x[live] for x in (index_N, hide_from_N, hide_until_N))
    seen = len(rows) - np.searchsorted(rows, index)
    first, last = np.maximum(low, index), np.maximum(high, index)
    hidden = np.maximum(np.searchsorted(rows, last) - np.searchsorted(rows, first), 0)
    return int((seen - hidden).sum())


def pairs(mask: Mask) -> int:
    return sum(int((mask.request_T == r).sum()) * int((mask.request_N == r).sum()) for r in np.unique(mask.request_T))


def entries_of(mask: Mask, page_size: int, seed: int = 0) -> PageTable:
    total = len(mask.index_N) // page_size
    page_S = np.random.default_rng(seed).permutation(total).astype(np.int32)

    def slots(x: Int) -> jax.Array:
        return jnp.asarray(x.reshape(total, page_size))

    offset_S, request_S = mask.offset_N[::page_size], mask.request_N[::page_size]
    return PageTable(
        jnp.asarray(page_S), jnp.asarray(offset_S), jnp.asarray(request_S),
        slots(mask.index_N), slots(mask.hide_from_N), slots(mask.hide_until_N),
    )  # fmt: skip


def rows_of(mask: Mask) -> Rows:
    """The rows; positions are not used by attention itself, which gets rotated queries."""
    order = jnp.asarray(mask.index_T)
    return Rows(order, jnp.maximum(order, 0), jnp.asarray(mask.request_T))


build_lists = jax.jit(visible_blocks, static_argnames="block_rows")  # the block lists of rows over entries, compiled


def view_of(mask: Mask, pages: Pages, rotation: Rotation, scale: float, block_rows: int) -> View:
    rows, entries = rows_of(mask), entries_of(mask, pages.page_size)
    blocks = build_lists(rows, entries, block_rows=block_rows)
    return View(rows, pages, 0, entries, rotation, blocks, scale, block_rows)


@partial(jax.jit, static_argnames=("pages", "page_size", "kv_heads", "dim", "dtype"))
def random_pages(key: jax.Array, pages: int, page_size: int, kv_heads: int, dim: int, dtype: str) -> Pages:
    shape = (1, pages, kv_heads, page_size, dim)
    return Pages(*(jax.random.normal(k, shape, jnp.dtype(dtype)) for k in jax.random.split(key)))


def visited_tiles(blocks: Blocks) -> int:
    return int(np.asarray(blocks.count_N, np.int64).sum())


BASE = 10000.0  # of the RoPE frequencies


def load_oracle() -> Any:
    """tests/support/oracle.py by its path: another package's top-level `tests` must not come in between."""
    name = "ragjax_tests_oracle"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "support" / "oracle.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


oracle = load_oracle()


def frequencies(dim: int) -> Any:
    """RoPE frequencies in float64."""
    return BASE ** -(np.arange(dim // 2) / (dim // 2))


@cache
def rotation(dim: int, length: int) -> Rotation:
    return Rotation.table(frequencies(dim), length)
