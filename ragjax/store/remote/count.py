"""What one process did with the shared tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, get_args

Drop = Literal["full", "off", "large", "failed"]
"""Why an entry was not written: too many waited, the server was off, it exceeds the limit, the server failed."""


@dataclass
class Counts:
    """Counters; any thread may add.

    asked: questions sent to the server. found: entries that answers named. reads, read_bytes: entries fetched and found
    intact. missing: of those found, gone when they were read. damaged: entries that were not as they were written;
    removed. writes, written_bytes: entries put. kept: entries that were there already. evicted: entries that left for
    those put. failures: calls that the server did not answer. refused: calls that it answered with an error.
    """

    numbers: Counter[str] = field(default_factory=Counter)
    dropped: Counter[Drop] = field(default_factory=Counter)
    _lock: Lock = field(default_factory=Lock)

    def add(self, **more: int) -> None:
        """Add to counters."""
        with self._lock:
            self.numbers.update(more)

    def drop(self, reason: Drop, count: int = 1) -> None:
        """Entries are not written."""
        with self._lock:
            self.dropped[reason] += count

    def read(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """A copy of all, and of those not written by reason."""
        with self._lock:
            return dict(self.numbers), {reason: self.dropped[reason] for reason in get_args(Drop)}
