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
        blocks = visible_blocks(rows, entries, block_rows)
        return View(rows, pages, layer, entries, rotation, blocks, scale, block_rows, cap=cap)


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
