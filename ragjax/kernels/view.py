"""The inputs of an attention call besides queries: one argument for the op, its backends and the reductions."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows

FLOATS = (jnp.float32, jnp.float16, jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class View:
    """Rows over the pages of a pool at one layer."""

    rows: Rows
    pages: Pages  # the pool, whole; it is read at `layer` alone
    layer: int | jax.Array
    entries: PageTable
    rotation: Rotation  # long enough for every |offset|
    blocks: Blocks  # the entries each row block visits (`blocks.visible_blocks`)
    scale: float = field(metadata={"static": True})  # of the softmax, 1/sqrt(D) as a rule
    block_rows: int = field(metadata={"static": True})  # T is a multiple of it; a block holds rows of one request only
    # on CPU, keys and values that blocks of many rows read become float32 before the products
    widen: bool = field(default=False, metadata={"static": True})
    # scaled logits x become cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2); None leaves them
    cap: float | None = field(default=None, metadata={"static": True})

    def capped(self, logits: jax.Array) -> jax.Array:
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)

    @staticmethod
    def build(
        rows: Rows,
        pages: Pages,
        layer: int | jax.Array,
        entries: PageTable,
        rotation: Rotation,
        *,
        scale: float,
        block_rows: int,
        cap: float | None = None,
    ) -> View:
        """A view whose block lists are made here; where layers share entries, make them once instead."""
        if block_rows < 1 or rows.index_T.shape[0] % block_rows:
            raise ValueError(f"block_rows {block_rows} does not divide the {rows.index_T.shape[0]} rows")
        blocks = visible_blocks(rows, entries, block_rows)
        return View(rows, pages, layer, entries, rotation, blocks, scale, block_rows, cap=cap)


def check(q_THD: jax.Array, view: View) -> None:
    """Raise ValueError naming the argument whose shape or dtype does not fit; and, outside of jit, whose values."""
    _check_shapes(q_THD, view)
    _check_dtypes(q_THD, view)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((view.rows, view.entries))):
        rows, entries = (jax.tree.map(np.asarray, part) for part in (view.rows, view.entries))
        check_values(
            request_T=rows.request_T,
            index_T=rows.index_T,
            position_T=rows.position_T,
            request_S=entries.request_S,
            page_S=entries.page_S,
            offset_S=entries.offset_S,
            pages=view.pages.k_LPKCD.shape[1],
            positions=view.rotation.cos_NR.shape[0],
            block_rows=view.block_rows,
        )


def check_values(
    *,
    request_T: ArrayLike,
    index_T: ArrayLike,
    position_T: ArrayLike,
    request_S: ArrayLike,
    page_S: ArrayLike,
    offset_S: ArrayLike,
    pages: int,
    positions: int,
    block_rows: int,
) -> None:
    """Raise ValueError naming the argument that is out of range: on a GPU a stray page id reads stray memory.

    Arrays are those of rows and entries; rows of index -1 are padding and entries of request -1 unused: both may hold
    anything. `pages`: of the pool; `positions`: of the rotation table; `block_rows`: of a block.
    """
    live_T, used_S = np.asarray(index_T) >= 0, np.asarray(request_S) >= 0
    _in_range("entries.page", np.asarray(page_S)[used_S], 0, pages, "pages of the pool")
    _in_range("entries.offset", np.abs(np.asarray(offset_S)[used_S]), 0, positions, "positions of the rotation table")
    _in_range("rows.position", np.asarray(position_T)[live_T], 0, positions, "positions of the rotation table")
    request_NB = np.asarray(request_T).reshape(-1, block_rows)
    live_NB = live_T.reshape(-1, block_rows)
    first_N = request_NB[np.arange(len(request_NB)), live_NB.argmax(1)]
    mixed_N = (live_NB & (request_NB != first_N[:, None])).any(1)
    if mixed_N.any():
        raise ValueError(f"rows.request mixes requests in block {int(mixed_N.argmax())} of {block_rows} rows")


def _in_range(name: str, values: np.ndarray, low: int, high: int, of: str) -> None:
    wrong = (values < low) | (values >= high)
    if wrong.any():
        raise ValueError(f"{name} holds {int(values[wrong.argmax()])}, outside of the {high} {of}")


def _check_shapes(q_THD: jax.Array, view: View) -> None:
    rows, pages, entries, rotation, blocks = view.rows, view.pages, view.entries, view.rotation, view.blocks
    for name, array, rank in (("q_THD", q_THD, 3), ("pages.k_LPKCD", pages.k_LPKCD, 5)):
        if array.ndim != rank:
            raise ValueError(f"{name} has {array.ndim} axes, not {rank}")
    t, heads, dim = q_THD.shape
    _, _, kv_heads, slots, pool_dim = pages.k_LPKCD.shape
    s = entries.request_S.shape[-1]
    if view.block_rows < 1 or t % view.block_rows:
        raise ValueError(f"block_rows {view.block_rows} does not divide the {t} rows of q_THD")
    n = t // view.block_rows
    wanted = {
        "rows.index_T": (rows.index_T.shape, (t,)),
        "rows.position_T": (rows.position_T.shape, (t,)),
        "rows.request_T": (rows.request_T.shape, (t,)),
        "pages.v_LPKCD": (pages.v_LPKCD.shape, pages.k_LPKCD.shape),
        "entries.request_S": (entries.request_S.shape, (s,)),
        "entries.page_S": (entries.page_S.shape, (s,)),
        "entries.offset_S": (entries.offset_S.shape, (s,)),
        "entries.index_SC": (entries.index_SC.shape, (s, slots)),
        "entries.hide_from_SC": (entries.hide_from_SC.shape, (s, slots)),
        "entries.hide_until_SC": (entries.hide_until_SC.shape, (s, slots)),
        "rotation.cos_NR": (rotation.cos_NR.shape[1:], (pool_dim // 2,)),
        "blocks.entry_NS": (blocks.entry_NS.shape, (n, s)),
        "blocks.count_N": (blocks.count_N.shape, (n,)),
        "blocks.partial_NU": (blocks.partial_NU.shape, (n, s)),
        "blocks.end_NU": (blocks.end_NU.shape, (n, s)),
        "blocks.runs_N": (blocks.runs_N.shape, (n,)),
    }
    for name, (shape, what) in wanted.items():
        if tuple(shape) != tuple(what):
            raise ValueError(f"{name} has shape {tuple(shape)}, not {tuple(what)}")
    if dim != pool_dim or heads % kv_heads:
        raise ValueError(f"q_THD has {heads} heads of {dim}; the pool has {kv_heads} KV heads of {pool_dim}")


def _check_dtypes(q_THD: jax.Array, view: View) -> None:
    parts = {"rows": view.rows, "entries": view.entries, "blocks": view.blocks}
    for name, array in ((f"{part}.{n}", x) for part, owner in parts.items() for n, x in vars(owner).items()):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, not int32")
    if q_THD.dtype not in FLOATS:
        raise ValueError(f"q_THD is {q_THD.dtype}, not float32, float16 or bfloat16")
    k, v = view.pages.k_LPKCD.dtype, view.pages.v_LPKCD.dtype
    if k not in (*FLOATS, jnp.uint16):
        raise ValueError(f"pages.k_LPKCD is {k}, not float32, float16, bfloat16 or uint16")
    if v != k:
        raise ValueError(f"pages.v_LPKCD is {v}, not {k} as pages.k_LPKCD")
