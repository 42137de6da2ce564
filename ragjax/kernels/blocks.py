"""Lists of the entries that each block of rows visits, built on the device, exact and never truncated.

A list is sorted into runs of entries with equal RoPE offset, so that a kernel rotates its queries once a run; inside a
run come first the entries that every row sees whole, which need no mask, then those that some row sees in part; entries
that no row sees are left out (`visibility`). The same lists serve all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ragjax.kernels.table import Extent, PageTable, Rows, seen_and_full, seen_keys

LAST = 2**31 - 1
"""Sorts behind every item; offsets stay below a quarter of it (`Runner.step` checks them)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Lists of entries, one a row block, int32; each array has at most blocks x entries items.

    Run u begins where run u - 1 ends, and is `[begin, partial)` full and `[partial, end)` partial items; U = S.
    """

    entry_NS: jax.Array  # the first `count_N` items of row n are the entries that block n visits, run after run
    count_N: jax.Array
    partial_NU: jax.Array  # where run u's partly visible items begin
    end_NU: jax.Array  # where it ends
    runs_N: jax.Array  # how many runs there are


def visible_blocks(rows: Rows, entries: PageTable, block_rows: int) -> Blocks:
    """The entries visible to each block of `block_rows` rows.

    Exact per key against the block's range of token indices: an entry is skipped iff each of its keys is hidden from
    all indices in [min, max] of the block, and full iff each is visible to all of them. Padding rows do not count.
    """
    seen_NS, full_NS = seen_and_full(_extent(rows, block_rows), entries.keys())
    offset_S = entries.offset_S
    key_NS = jnp.where(seen_NS, 2 * offset_S + (~full_NS).astype(jnp.int32), jnp.int32(LAST))
    entry_NS = jnp.argsort(key_NS, axis=1, stable=True).astype(jnp.int32)
    count_N = seen_NS.sum(1, dtype=jnp.int32)
    return Blocks(entry_NS, count_N, *_runs(offset_S[entry_NS], jnp.take_along_axis(full_NS, entry_NS, 1), count_N))


def visible_slots(rows: Rows, entries: PageTable, block_rows: int) -> jax.Array:
    """True where a key is visible to some token index in [min, max] of a block of rows, bool [N, S, C]."""
    return seen_keys(_extent(rows, block_rows), entries.keys())


def _extent(rows: Rows, block_rows: int) -> Extent:
    index_NB, request_NB = (x.reshape(-1, block_rows) for x in (rows.index_T, rows.request_T))
    return Extent.of(index_NB, request_NB, index_NB >= 0)


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
