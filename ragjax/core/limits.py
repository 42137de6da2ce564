"""How much one step may read: the only place that counts entries of the page table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragjax.core.errors import RequestError
from ragjax.core.passes import Run, Span


@dataclass(frozen=True)
class StepLimits:
    """What the largest compiled step can read.

    entries: entries of its page table; an entry is one page at one RoPE offset. page_size: slots of a page.
    """

    entries: int
    page_size: int

    def entries_for(self, tokens: int, runs: int) -> int:
        """Most entries that so many tokens in so many runs can take."""
        return -(-tokens // self.page_size) + 2 * runs

    def holds(self, tokens: int, runs: int) -> bool:
        """Whether a step surely reads so many tokens in so many runs."""
        return self.entries_for(tokens, runs) <= self.entries

    def room_beside(self, tokens: int, runs: int) -> int:
        """Entries that are left beside so many tokens in so many runs; below 0 if these may not fit."""
        return self.entries - self.entries_for(tokens, runs)

    def leading(self, runs: Iterable[Run], tokens: int, room: int | None = None) -> tuple[int, int]:
        """How many runs of a prefix to read, from its first, and their tokens; what is left of `tokens` is computed.

        A prefix that many requests made piece by piece lies scattered: each piece takes a page, and an entry.

        Args:
            runs: of the prefix that was found.
            tokens: of the prefix as it is needed.
            room: entries for it (all, if None).
        """
        room = self.entries if room is None else room
        used, found, best = 0, 0, (0, 0)
        for i, run in enumerate(runs, 1):
            used, found = used + len(run.pages), found + run.length
            if used + -(-(tokens - found) // self.page_size) < room:  # one is left for a page that two spans share
                best = i, found
        return best

    def densest(self, found: Mapping[int, Sequence[Span]], room: int) -> frozenset[int]:
        """Which of the span lists to read through `room` entries; entries with the fewest tokens are left out first.

        Short runs that many requests made lie scattered, a page each. A span that stands twice at one offset takes two
        entries.
        """
        tokens = Counter[int]()
        latest: dict[tuple[int, int], tuple[int, int]] = {}  # page and offset -> entry filled last, its slots as bits
        read: dict[int, set[int]] = {i: set() for i in found}
        for i, spans in found.items():
            for span in spans:
                for at, page in enumerate(span.run.pages):
                    low = max(span.run.start - at * self.page_size, 0)
                    high = min(span.run.start + span.run.length - at * self.page_size, self.page_size)
                    slots = (1 << high) - (1 << low)
                    entry, taken = latest.get((page, span.offset), (len(tokens), 0))
                    if taken & slots:
                        entry, taken = len(tokens), 0
                    latest[page, span.offset] = entry, taken | slots
                    tokens[entry] += high - low
                    read[i].add(entry)
        kept = {entry for entry, _ in tokens.most_common(max(room, 0))}
        return frozenset(i for i, entries in read.items() if entries <= kept)

    def check(self, entries: int) -> None:
        """Refuse a page table that no step can read.

        Raises:
            RequestError: if it has more entries.
        """
        if entries > self.entries:
            raise RequestError(
                f"the prompt is in too many pieces for one step: {entries} entries of the page table, at most "
                f"{self.entries}. Shorten the prompt or use fewer chunks",
                param="messages",
                code="context_length_exceeded",
            )
