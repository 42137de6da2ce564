"""Rows of queries, the page table of keys, and the one rule of visibility (`visible`).

A key is visible to a row iff both belong to the same request and

    index[key] <= index[row]  and not  (hide_from[key] <= index[row] < hide_until[key])

which says causal attention, independent chunks, dependency trees, stale slots and unused slots with O(n)
numbers (FusionRAG §4.3, DepCache §3.3; the interval form is FlashMask's, arXiv 2410.01359).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Query rows, int32 [T] each. Padding rows have index -1 and see nothing.

    Blocks of consecutive rows (see `block_rows`) must not mix requests.
    """

    index_T: jax.Array
    position_T: jax.Array
    request_T: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTable:
    """Keys of the pass: an entry is one page as one request sees it. A leading axis of 1 (all layers alike) or L.

    page, offset: int32 [A, S]; request: int32 [S], -1 for an unused entry.
    index, hide_from, hide_until: int32 [A, S, C]; an unused slot has index `core.NEVER`.
    """

    page_AS: jax.Array
    offset_AS: jax.Array
    request_S: jax.Array
    index_ASC: jax.Array
    hide_from_ASC: jax.Array
    hide_until_ASC: jax.Array

    def layer(self, layer: int) -> PageTable:
        """The entries as one layer sees them, leading axis 1."""
        if self.page_AS.shape[0] == 1:
            return self
        pick = slice(layer, layer + 1)
        return PageTable(
            self.page_AS[pick],
            self.offset_AS[pick],
            self.request_S,
            self.index_ASC[pick],
            self.hide_from_ASC[pick],
            self.hide_until_ASC[pick],
        )


def visible(rows: Rows, entries: PageTable) -> jax.Array:
    """The rule itself, bool [T, S, C]: an n x n array, for the definition and for tests only."""
    q_T11 = rows.index_T[:, None, None]
    index_SC, hide_from_SC, hide_until_SC = entries.index_ASC[0], entries.hide_from_ASC[0], entries.hide_until_ASC[0]
    same_TS = (rows.request_T[:, None] == entries.request_S) & (entries.request_S >= 0) & (rows.index_T >= 0)[:, None]
    return same_TS[:, :, None] & (index_SC <= q_T11) & ~((hide_from_SC <= q_T11) & (q_T11 < hide_until_SC))
