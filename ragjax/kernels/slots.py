"""Rows that look and slots that are looked at, and the one rule of visibility (`visible`).

A key is visible to a row iff both belong to the same request and

    order[key] <= order[row]  and not  (hide_from[key] <= order[row] < hide_until[key])

which says causal attention, independent chunks, dependency trees, stale cells and unused cells with O(n)
numbers (FusionRAG §4.3, DepCache §3.3; the interval form is FlashMask's, arXiv 2410.01359).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Query rows, int32 [T] each. Padding rows have order -1 and see nothing.

    Blocks of consecutive rows (see `block_rows`) must not mix requests.
    """

    order_T: jax.Array
    position_T: jax.Array
    request_T: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Keys of the pass: a slot is one page as one request sees it. A leading axis of 1 (all layers alike) or L.

    page, offset: int32 [A, S]; request: int32 [S], -1 for an unused slot.
    order, hide_from, hide_until: int32 [A, S, C]; a cell that takes no part has order `core.NEVER`.
    """

    page_AS: jax.Array
    offset_AS: jax.Array
    request_S: jax.Array
    order_ASC: jax.Array
    hide_from_ASC: jax.Array
    hide_until_ASC: jax.Array

    def layer(self, layer: int) -> Slots:
        """The slots as one layer sees them, leading axis 1."""
        if self.page_AS.shape[0] == 1:
            return self
        pick = slice(layer, layer + 1)
        return Slots(
            self.page_AS[pick],
            self.offset_AS[pick],
            self.request_S,
            self.order_ASC[pick],
            self.hide_from_ASC[pick],
            self.hide_until_ASC[pick],
        )


def visible(rows: Rows, slots: Slots) -> jax.Array:
    """The rule itself, bool [T, S, C]: an n x n array, for the definition and for tests only."""
    q_T11 = rows.order_T[:, None, None]
    order_SC, hide_from_SC, hide_until_SC = slots.order_ASC[0], slots.hide_from_ASC[0], slots.hide_until_ASC[0]
    same_TS = (rows.request_T[:, None] == slots.request_S) & (slots.request_S >= 0) & (rows.order_T >= 0)[:, None]
    return same_TS[:, :, None] & (order_SC <= q_T11) & ~((hide_from_SC <= q_T11) & (q_T11 < hide_until_SC))
