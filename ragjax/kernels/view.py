"""The inputs of an attention call besides queries: one argument for the op, its backends and the reductions."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

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
