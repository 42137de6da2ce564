"""Rows that look and the entries of the page table that they look at."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ragjax.kernels.visibility import Keys, sees


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
    """Keys of the pass: an entry is one page as one request sees it.

    page, offset, request: int32 [S]; request -1 is an unused entry.
    index, hide_from, hide_until: int32 [S, C]; an unused slot has index `core.NEVER`.
    """

    page_S: jax.Array
    offset_S: jax.Array
    request_S: jax.Array
    index_SC: jax.Array
    hide_from_SC: jax.Array
    hide_until_SC: jax.Array

    def keys(self) -> Keys:
        """What visibility asks of the slots."""
        return Keys(self.index_SC, self.request_S[:, None], self.hide_from_SC, self.hide_until_SC)


def visible(rows: Rows, entries: PageTable) -> jax.Array:
    """The rule of `visibility`, bool [T, S, C]: an n x n array, for the definition and for tests only."""
    same_TS = (rows.request_T[:, None] == entries.request_S) & (entries.request_S >= 0) & (rows.index_T >= 0)[:, None]
    row_T11 = rows.index_T[:, None, None]
    return same_TS[:, :, None] & sees(row_T11, entries.index_SC, entries.hide_from_SC, entries.hide_until_SC)
