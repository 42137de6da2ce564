"""What a router believes that a replica's cache holds."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from ragjax.cluster.router.base import keep
from ragjax.cluster.router.need import Need

MOST = 100_000
"""Pieces that are kept of a replica; the least recently used go first."""


class Memory:
    """The pieces that a replica was sent, and how far back it remembers them.

    The clock counts tokens that the replica was sent. A piece is believed to be held while the clock has gone on by no
    more than `reach` since the piece was last sent. Answers correct the reach: they say of every piece whether it was
    found. So nothing has to be reported, and the cache's tiers, policy and size need not be known; a wrong belief costs
    a hit.
    """

    def __init__(self) -> None:
        self.reach = math.inf
        self._clock = 0
        self._sent: OrderedDict[bytes, int] = OrderedDict()
        """Piece to the clock when it was last sent."""

    def __len__(self) -> int:
        return len(self._sent)

    def held(self, need: Need) -> int:
        """Tokens of the request that are believed to be held; of chained pieces the first ones in a row."""
        found = 0
        for piece, size in zip(need.pieces, need.sizes, strict=True):
            age = self._age(piece)
            if age is not None and age <= self.reach:
                found += size
            elif need.chained:
                break
        return found

    def send(self, need: Need) -> tuple[int | None, ...]:
        """Note a request that is sent; the age of each of its pieces until now, for `learn` (None: never sent)."""
        ages = tuple(self._age(piece) for piece in need.pieces)
        self._clock += need.total
        for piece in need.pieces:
            keep(self._sent, piece, self._clock, MOST)
        return ages

    def learn(self, need: Need, ages: Sequence[int | None], found: Sequence[int]) -> None:
        """Correct the reach by what a request found. ages: as `send` gave them.

        One that found nothing says nothing: some strategies look for nothing.
        """
        if not any(found):
            return
        for age, size, had in zip(ages, need.sizes, found, strict=True):
            if age is None:
                continue
            if 2 * had < size and age <= self.reach:
                self.reach = float(age) if math.isinf(self.reach) else (self.reach + age) / 2
            elif 2 * had >= size and age > self.reach:
                self.reach = float(age)

    def _age(self, piece: bytes) -> int | None:
        at = self._sent.get(piece)
        return None if at is None else self._clock - at
