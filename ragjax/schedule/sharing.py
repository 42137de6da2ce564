"""Which decoding requests share keys, so that their rows read these together.

Requests over the same first passages have the same pages in front. Their rows then look at these pages in one block,
which reads a key once for all of them, and each looks at the rest alone; both parts merge exactly (Hydragen, arXiv
2402.05099; cascade inference in FlashInfer, arXiv 2501.01005). A request is in one group at most: of nested groups
(all share the first passage, four also the second) those are taken that save most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragjax.schedule.table import PageTable

BLOCK_READS = 2.0
"""What an entry costs that a block of rows reads together, in reads of a row alone."""


@dataclass(frozen=True)
class Group:
    """Requests that share the first entries of their page tables.

    members: numbers of the requests. entries: how many they share. blocks: of rows that read them together. saved: how
    many reads of an entry by a row alone that saves.
    """

    members: tuple[int, ...]
    entries: int
    blocks: int
    saved: float

    @property
    def listed(self) -> int:
        """Entries of a step that hold what is shared."""
        return self.entries * self.blocks


@dataclass(frozen=True)
class _Search:
    """lasting: hashes of entries, a request (`PageTable.lasting`). rows: of each request. block: rows of a block."""

    lasting: Sequence[NDArray[np.int64]]
    rows: Sequence[int]
    block: int

    def best(self, members: Sequence[int]) -> list[Group]:
        """The groups of some requests that together save most."""
        common = _common([self.lasting[i] for i in members])
        apart = [group for part in self._split(members, common) for group in self.best(part)]
        together = self._group(members, common)
        if together.saved > sum(group.saved for group in apart):
            return [together]
        return apart

    def _group(self, members: Sequence[int], entries: int) -> Group:
        rows = sum(self.rows[i] for i in members)
        blocks = -(-rows // self.block)
        return Group(tuple(members), entries, blocks, entries * (rows - BLOCK_READS * blocks))

    def _split(self, members: Sequence[int], at: int) -> list[list[int]]:
        """Requests with the same entry at a place, two or more each."""
        parts: dict[int, list[int]] = {}
        for i in members:
            if len(self.lasting[i]) > at:
                parts.setdefault(int(self.lasting[i][at]), []).append(i)
        return [part for part in parts.values() if len(part) > 1]


def find_groups(tables: Sequence[PageTable], rows: Sequence[int], sharing: tuple[int, int]) -> list[Group]:
    """The groups that save most, as many as have places.

    Args:
        tables: of the requests.
        rows: how many each request has.
        sharing: places for rows, and places of a block (`core.RowShape.sharing`).
    """
    places, block = sharing
    if not places or len(tables) < 2:
        return []
    found = _Search([table.lasting for table in tables], rows, block).best(range(len(tables)))
    chosen, left = [], places // block
    for group in sorted(found, key=lambda group: -group.saved):
        if group.blocks <= left:
            chosen.append(group)
            left -= group.blocks
    return chosen


def _common(lists: Sequence[NDArray[np.int64]]) -> int:
    """How many leading items all lists have in common."""
    size = min(map(len, lists))
    same = np.stack([one[:size] for one in lists]) == lists[0][:size]
    return size if same.all() else int(same.all(0).argmin())
