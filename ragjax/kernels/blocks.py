"""Which slots each block of rows has to visit, built on the device, exact and never truncated.

A list is sorted into runs of slots with equal RoPE offset, so that a kernel rotates its queries once a run; inside a
run come first the slots that every row sees whole, which need no mask, then those that some row sees in part; slots
that no row sees are left out. The same lists serve all layers with equal slots. The skip and full tests are
FlashMask's (arXiv 2410.01359 §4.1), taken per key instead of per tile, so a slot is never visited in vain for its
neighbours' sake.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ragjax.kernels.slots import Rows, Slots

LAST = 2**31 - 1
"""Sorts behind every entry; offsets stay below a quarter of it (`view.check_values`)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Lists of slots, one a row block, int32; each array has at most blocks x slots entries.

    slot_NS: the first `count_N` entries of row n are the slots that block n visits, run after run.
    partial_NU, end_NU: where run u's partly visible entries begin, and where the run ends; U = S. Run u begins where
        run u - 1 ends, and is `[begin, partial)` full and `[partial, end)` partial entries.
    runs_N: how many runs there are.
    """

    slot_NS: jax.Array
    count_N: jax.Array
    partial_NU: jax.Array
    end_NU: jax.Array
    runs_N: jax.Array


def visible_blocks(rows: Rows, slots: Slots, block_rows: int) -> Blocks:
    """The slots visible to each block of `block_rows` rows; slots have a leading axis of 1.

    Exact per key against the block's range of orders: a slot is skipped iff each of its keys is hidden from all
    orders in [min, max] of the block, and full iff each is visible to all of them. Padding rows do not count.
    """
    seen_NS, full_NS = _extent(rows, slots, block_rows)
    offset_S = slots.offset_AS[0]
    key_NS = jnp.where(seen_NS, 2 * offset_S + (~full_NS).astype(jnp.int32), jnp.int32(LAST))
    slot_NS = jnp.argsort(key_NS, axis=1, stable=True).astype(jnp.int32)
    count_N = seen_NS.sum(1, dtype=jnp.int32)
    return Blocks(slot_NS, count_N, *_runs(offset_S[slot_NS], jnp.take_along_axis(full_NS, slot_NS, 1), count_N))


def _extent(rows: Rows, slots: Slots, block_rows: int) -> tuple[jax.Array, jax.Array]:
    """Whether any, and whether every, live row of a block sees keys of a slot, bool [N, S] each."""
    order_NB = rows.order_T.reshape(-1, block_rows)
    live_NB = order_NB >= 0
    low_N11 = jnp.where(live_NB, order_NB, jnp.int32(2**30)).min(1)[:, None, None]
    high_N11 = order_NB.max(1)[:, None, None]
    request_N = jnp.where(live_NB, rows.request_T.reshape(-1, block_rows), -1).max(1)
    order_SC, hide_from_SC, hide_until_SC = slots.order_ASC[0], slots.hide_from_ASC[0], slots.hide_until_ASC[0]
    first_NSC = jnp.maximum(low_N11, order_SC)  # orders before a key's own do not see it anyway
    hidden_NSC = (order_SC > high_N11) | ((hide_from_SC <= first_NSC) & (hide_until_SC > high_N11))
    overlap_NSC = jnp.maximum(hide_from_SC, low_N11) < jnp.minimum(hide_until_SC, high_N11 + 1)
    shown_NSC = (order_SC <= low_N11) & ~overlap_NSC
    same_NS = (slots.request_S == request_N[:, None]) & (slots.request_S >= 0)
    return same_NS & ~hidden_NSC.all(-1), same_NS & shown_NSC.all(-1)


def _runs(offset_NS: jax.Array, full_NS: jax.Array, count_N: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`partial_NU`, `end_NU` and `runs_N` of sorted lists."""
    blocks, size = offset_NS.shape
    entry_S = jnp.arange(size, dtype=jnp.int32)
    listed_NS = entry_S < count_N[:, None]
    changed_NS = jnp.concatenate([jnp.ones((blocks, 1), bool), offset_NS[:, 1:] != offset_NS[:, :-1]], axis=1)
    starts_NS = listed_NS & changed_NS
    begin_NU = jnp.sort(jnp.where(starts_NS, entry_S, count_N[:, None]), axis=1)
    end_NU = jnp.concatenate([begin_NU[:, 1:], count_N[:, None]], axis=1)
    zero_N1 = jnp.zeros((blocks, 1), jnp.int32)
    whole_NS = jnp.concatenate([zero_N1, jnp.cumsum(listed_NS & full_NS, axis=1, dtype=jnp.int32)], axis=1)
    whole_NU = jnp.take_along_axis(whole_NS, end_NU, 1) - jnp.take_along_axis(whole_NS, begin_NU, 1)
    return begin_NU + whole_NU, end_NU, starts_NS.sum(1, dtype=jnp.int32)
