"""Entries of host memory, their bytes by tenant, and the orders for the transfer engine that come of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ragjax.core import Run
from ragjax.core.tiers import Copy, Record, Save, TransferEngine, Write


@dataclass
class SavedEntry:
    size: int  # bytes
    tenant: str
    nodes: int = 1  # that lie in it; a split leaves two


class HostMemory:
    """Entries of host memory by number, the bytes `used` by them, and those `held` by tenant."""

    def __init__(self, engine: TransferEngine | None):
        self._engine = engine
        self.entries: dict[int, SavedEntry] = {}
        self.used = 0
        self.held = Counter[str]()
        self._number = 0
        # orders that the engine gets at the end of an operation, in this sequence
        self._saves: list[Save] = []
        self._writes: list[Write] = []
        self._forgotten: list[int] = []

    def save(self, run: Run, size: int, tenant: str) -> Copy:
        self._number += 1
        self.entries[self._number] = SavedEntry(size, tenant)
        self._count(tenant, size)
        self._saves.append(Save(self._number, run))
        return Copy(self._number, 0, run.length)

    def write(self, record: Record, copy: Copy) -> None:
        self._writes.append(Write(record, copy))

    def share(self, copy: Copy) -> None:
        self._entry(copy).nodes += 1

    def leave(self, copy: Copy) -> None:
        entry = self._entry(copy)
        entry.nodes -= 1
        if not entry.nodes:
            assert isinstance(copy.entry, int)
            del self.entries[copy.entry]
            self._count(entry.tenant, -entry.size)
            self._forgotten.append(copy.entry)

    def dispatch(self) -> None:
        saves, self._saves = self._saves, []
        writes, self._writes = self._writes, []
        forgotten, self._forgotten = self._forgotten, []
        if self._engine is None:
            return
        if saves:
            self._engine.save(saves)
        if writes:
            self._engine.write(writes)
        if forgotten:
            self._engine.forget(forgotten)

    def _count(self, tenant: str, size: int) -> None:
        self.used += size
        self.held[tenant] += size

    def _entry(self, copy: Copy) -> SavedEntry:
        assert isinstance(copy.entry, int)
        return self.entries[copy.entry]
