"""Query rows, the entries of the page table that they read, and the one rule of visibility between them.

A key is visible to a row iff both belong to the same request and

    index[key] <= index[row]  and not  (hide_from[key] <= index[row] < hide_until[key])

which says causal attention, independent chunks, dependency trees, stale slots and unused slots with O(n) numbers
(FusionRAG §4.3, DepCache §3.3; the interval form is FlashMask's, arXiv 2410.01359). The tests for a range of rows are
FlashMask's skip and full tests (§4.1), taken per key instead of per tile, so that no tile is visited for its
neighbours' sake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.core import NEVER

TOGETHER = 64
"""Blocks of rows compared with all keys at once: what is held meanwhile grows with the keys alone."""


def sees(row: jax.Array, key: jax.Array, hide_from: jax.Array, hide_until: jax.Array) -> jax.Array:
    """The rule for a row and a key of one request; int32 arrays that broadcast, bool."""
    hidden = (hide_from <= row) & (row < hide_until)
    return (key <= row) & ~hidden


class Keys(NamedTuple):
    """Token index and request of keys, and the indices [hide_from, hide_until) that do not see them; int32 [S, C].

    Request -1 is padding; `request_SC` may be [S, 1].
    """

    index_SC: jax.Array
    request_SC: jax.Array
    hide_from_SC: jax.Array
    hide_until_SC: jax.Array


class Extent(NamedTuple):
    """Blocks of rows, int32 [N] each: least and greatest token index, and request, of a block's live rows."""

    low: jax.Array
    high: jax.Array
    first: jax.Array
    last: jax.Array

    @staticmethod
    def of(index_NB: jax.Array, request_NB: jax.Array, live_NB: jax.Array) -> Extent:
        """The extent of these rows; a block without live rows sees nothing."""
        low_N, first_N = (jnp.where(live_NB, x, jnp.int32(NEVER)).min(1) for x in (index_NB, request_NB))
        high_N, last_N = (jnp.where(live_NB, x, -1).max(1) for x in (index_NB, request_NB))
        return Extent(low_N, high_N, first_N, last_N)

    def some(self, keys: Keys) -> jax.Array:
        """For one block, whether some index of it sees a key, bool [S, C]."""
        begin_SC = jnp.maximum(self.low, keys.index_SC)  # smaller indices than the key's own do not see it anyway
        hidden_SC = (keys.hide_from_SC <= begin_SC) & (keys.hide_until_SC > self.high)
        return self._has(keys) & (keys.index_SC <= self.high) & ~hidden_SC

    def all(self, keys: Keys) -> jax.Array:
        """For one block, whether every index of it sees a key, bool [S, C]."""
        overlap_SC = jnp.maximum(keys.hide_from_SC, self.low) < jnp.minimum(keys.hide_until_SC, self.high + 1)
        return self._has(keys) & (keys.index_SC <= self.low) & ~overlap_SC

    def _has(self, keys: Keys) -> jax.Array:
        return (self.first <= keys.request_SC) & (keys.request_SC <= self.last)


def seen_keys(extent: Extent, keys: Keys) -> jax.Array:
    """True where some index of a block sees a key, bool [N, S, C]."""
    seen_NSC: jax.Array = lax.map(lambda block: block.some(keys), extent, batch_size=TOGETHER)
    return seen_NSC


def seen_and_full(extent: Extent, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """True where a block sees some key of an entry, and where every index sees all keys; bool [N, S] each."""

    def of_block(block: Extent) -> tuple[jax.Array, jax.Array]:
        return block.some(keys).any(-1), block.all(keys).all(-1)

    found: tuple[jax.Array, jax.Array] = lax.map(of_block, extent, batch_size=TOGETHER)
    return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Query rows, int32 [T] each: token index, position and request. Padding rows have index -1 and see nothing.

    Blocks of consecutive rows (`View.block_rows`) must not mix requests.
    """

    index_T: jax.Array
    position_T: jax.Array
    request_T: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Keys of the pass, int32: an entry is one page as one request sees it."""

    page_S: jax.Array
    offset_S: jax.Array
    request_S: jax.Array  # -1 is an unused entry
    index_SC: jax.Array  # an unused slot has index `core.NEVER`
    hide_from_SC: jax.Array
    hide_until_SC: jax.Array

    def keys(self) -> Keys:
        return Keys(self.index_SC, self.request_S[:, None], self.hide_from_SC, self.hide_until_SC)


def visible(rows: Rows, entries: PageTable) -> jax.Array:
    """The rule of `visibility`, bool [T, S, C]: an n x n array, for the definition and for tests only."""
    same_TS = (rows.request_T[:, None] == entries.request_S) & (entries.request_S >= 0) & (rows.index_T >= 0)[:, None]
    row_T11 = rows.index_T[:, None, None]
    return same_TS[:, :, None] & sees(row_T11, entries.index_SC, entries.hide_from_SC, entries.hide_until_SC)
