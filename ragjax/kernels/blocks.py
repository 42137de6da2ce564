"""Which entries each block of rows has to visit, built on the device, exact and never truncated.

A list is sorted into runs of entries with equal RoPE offset, so that a kernel rotates its queries once a run; inside a
run come first the entries that every row sees whole, which need no mask, then those that some row sees in part; entries
that no row sees are left out. The same lists serve all layers with equal entries. The skip and full tests are
FlashMask's (arXiv 2410.01359 §4.1), taken per key instead of per tile, so an entry is never visited in vain for its
neighbours' sake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import NEVER
from ragjax.kernels.table import PageTable, Rows

LAST = 2**31 - 1
"""Sorts behind every item; offsets stay below a quarter of it (`view.check_values`)."""

TOGETHER = 64
"""Blocks compared with all keys at once: what is held meanwhile grows with the keys alone."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Lists of entries, one a row block, int32; each array has at most blocks x entries items.

    entry_NS: the first `count_N` items of row n are the entries that block n visits, run after run.
    partial_NU, end_NU: where run u's partly visible items begin, and where the run ends; U = S. Run u begins where
        run u - 1 ends, and is `[begin, partial)` full and `[partial, end)` partial items.
    runs_N: how many runs there are.
    """

    entry_NS: jax.Array
    count_N: jax.Array
    partial_NU: jax.Array
    end_NU: jax.Array
    runs_N: jax.Array


def visible_blocks(rows: Rows, entries: PageTable, block_rows: int) -> Blocks:
    """The entries visible to each block of `block_rows` rows; entries have a leading axis of 1.

    Exact per key against the block's range of orders: an entry is skipped iff each of its keys is hidden from all
    orders in [min, max] of the block, and full iff each is visible to all of them. Padding rows do not count.
    """
    seen_NS, full_NS = _seen_and_full(rows, entries, block_rows)
    offset_S = entries.offset_AS[0]
    key_NS = jnp.where(seen_NS, 2 * offset_S + (~full_NS).astype(jnp.int32), jnp.int32(LAST))
    entry_NS = jnp.argsort(key_NS, axis=1, stable=True).astype(jnp.int32)
    count_N = seen_NS.sum(1, dtype=jnp.int32)
    return Blocks(entry_NS, count_N, *_runs(offset_S[entry_NS], jnp.take_along_axis(full_NS, entry_NS, 1), count_N))


def visible_slots(rows: Rows, entries: PageTable, block_rows: int) -> jax.Array:
    """Whether a key is visible to some order in [min, max] of a block of rows, bool [N, S, C]."""

    def of_block(extent: _Extent) -> jax.Array:
        return extent.request_of(entries)[:, None] & ~extent.hides(entries)

    seen_NSC: jax.Array = lax.map(of_block, _extents(rows, block_rows), batch_size=TOGETHER)
    return seen_NSC


class _Extent(NamedTuple):
    """Lowest and highest order of a block's live rows, and their request, -1 if there are none."""

    low: jax.Array
    high: jax.Array
    request: jax.Array

    def request_of(self, entries: PageTable) -> jax.Array:
        """Whether an entry is of the block's request, bool [S]."""
        return (entries.request_S == self.request) & (self.request >= 0)

    def hides(self, entries: PageTable) -> jax.Array:
        """Whether a key is hidden from all orders of the block, bool [S, C]."""
        first_SC = jnp.maximum(self.low, entries.index_ASC[0])  # orders before a key's own do not see it anyway
        over_SC = (entries.hide_from_ASC[0] <= first_SC) & (entries.hide_until_ASC[0] > self.high)
        return (entries.index_ASC[0] > self.high) | over_SC

    def shows(self, entries: PageTable) -> jax.Array:
        """Whether a key is visible to all orders of the block, bool [S, C]."""
        begin_SC = jnp.maximum(entries.hide_from_ASC[0], self.low)
        end_SC = jnp.minimum(entries.hide_until_ASC[0], self.high + 1)
        return (entries.index_ASC[0] <= self.low) & (begin_SC >= end_SC)


def _extents(rows: Rows, block_rows: int) -> _Extent:
    """Of all blocks, [N] each."""
    index_NB = rows.index_T.reshape(-1, block_rows)
    live_NB = index_NB >= 0
    low_N = jnp.where(live_NB, index_NB, jnp.int32(NEVER)).min(1)
    request_N = jnp.where(live_NB, rows.request_T.reshape(-1, block_rows), -1).max(1)
    return _Extent(low_N, index_NB.max(1), request_N)


def _seen_and_full(rows: Rows, entries: PageTable, block_rows: int) -> tuple[jax.Array, jax.Array]:
    """Whether any, and whether every, live row of a block sees keys of an entry, bool [N, S] each."""

    def of_block(extent: _Extent) -> tuple[jax.Array, jax.Array]:
        same_S = extent.request_of(entries)
        return same_S & ~extent.hides(entries).all(-1), same_S & extent.shows(entries).all(-1)

    found: tuple[jax.Array, jax.Array] = lax.map(of_block, _extents(rows, block_rows), batch_size=TOGETHER)
    return found


def _runs(offset_NS: jax.Array, full_NS: jax.Array, count_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partial_NU`, `end_NU` and `runs_N` of sorted lists."""
    blocks, size = offset_NS.shape
    item_S = jnp.arange(size, dtype=jnp.int32)
    listed_NS = item_S < count_N[:, None]
    changed_NS = jnp.concatenate([jnp.ones((blocks, 1), bool), offset_NS[:, 1:] != offset_NS[:, :-1]], axis=1)
    starts_NS = listed_NS & changed_NS
    begin_NU = jnp.sort(jnp.where(starts_NS, item_S, count_N[:, None]), axis=1)
    end_NU = jnp.concatenate([begin_NU[:, 1:], count_N[:, None]], axis=1)
    zero_N1 = jnp.zeros((blocks, 1), jnp.int32)
    whole_NS = jnp.concatenate([zero_N1, jnp.cumsum(listed_NS & full_NS, axis=1, dtype=jnp.int32)], axis=1)
    whole_NU = jnp.take_along_axis(whole_NS, end_NU, 1) - jnp.take_along_axis(whole_NS, begin_NU, 1)
    return begin_NU + whole_NU, end_NU, starts_NS.sum(1, dtype=jnp.int32)
