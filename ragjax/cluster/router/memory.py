"""What a router believes that the caches of replicas hold."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ragjax.cluster.router.need import Need

MOST = 100_000
"""Pieces that are kept of a replica; the least recently used go first."""
FAR = 2.0
"""A piece is kept until it was last sent so many times the reach ago: what is found beyond the reach corrects it."""


@dataclass
class _Replica:
    """reach, clock: see `Memory`. sent: the pieces that are kept of it, the one sent longest ago first."""

    reach: float = math.inf
    clock: int = 0
    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class Memory:
    """The pieces that each replica was sent, by piece, and how far back each replica remembers them.

    A replica's clock counts tokens that it was sent. A piece is believed to be held while the clock has gone on by no
    more than the reach since the piece was last sent. Answers correct the reach: they say of every piece whether it was
    found. So nothing has to be reported, and the cache's tiers, policy and size need not be known; a wrong belief costs
    a hit.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._sent: dict[bytes, dict[str, int]] = {}
        """Piece to the clocks of replicas when it was last sent to them."""

    def sizes(self) -> Mapping[str, int]:
        """How many pieces are kept of each replica."""
        return {name: len(one.sent) for name, one in self._replicas.items()}

    def reach(self, replica: str) -> float:
        """How many tokens ago a piece may have been sent to the replica, and be held."""
        return self._replicas[replica].reach

    def held(self, need: Need) -> dict[str, int]:
        """Tokens of the request that are believed to be held, by the replicas that hold some.

        A piece of a chain was sent with all pieces before it: who holds it holds them.
        """
        found: dict[str, int] = {}
        if need.chained:
            for piece, tokens in zip(need.pieces, accumulate(need.sizes), strict=True):
                found.update(dict.fromkeys(self._holders(piece), tokens))
            return found
        for piece, size in zip(need.pieces, need.sizes, strict=True):
            for name in self._holders(piece):
                found[name] = found.get(name, 0) + size
        return found

    def _holders(self, piece: bytes) -> list[str]:
        replicas = self._replicas
        clocks = self._sent.get(piece, {})
        return [name for name, at in clocks.items() if (one := replicas[name]).clock - at <= one.reach]

    def send(self, need: Need, replica: str) -> tuple[int | None, ...]:
        """Note a request that is sent; the age of each of its pieces until now, for `learn` (None: not kept)."""
        one = self._replicas.setdefault(replica, _Replica())
        before = [self._sent.get(piece, {}).get(replica) for piece in need.pieces]
        ages = tuple(None if at is None else one.clock - at for at in before)
        one.clock += need.total
        for piece in need.pieces:
            self._sent.setdefault(piece, {})[replica] = one.clock
            one.sent[piece] = None
            one.sent.move_to_end(piece)
        self._trim(replica, one)
        return ages

    def _trim(self, replica: str, one: _Replica) -> None:
        while one.sent:
            oldest = next(iter(one.sent))
            if len(one.sent) <= MOST and one.clock - self._sent[oldest][replica] <= FAR * one.reach:
                return
            del one.sent[oldest]
            self._drop(oldest, replica)

    def _drop(self, piece: bytes, replica: str) -> None:
        clocks = self._sent[piece]
        del clocks[replica]
        if not clocks:
            del self._sent[piece]

    def learn(self, need: Need, replica: str, ages: Sequence[int | None], found: Sequence[int]) -> None:
        """Correct the reach by what a request found. ages: as `send` gave them.

        One that found nothing says nothing: some strategies look for nothing. Nor does a piece that was not found right
        after it was sent: it was computed elsewhere at that time, or is never kept.
        """
        one = self._replicas.get(replica)
        if one is None or not any(found):
            return
        for age, size, had in zip(ages, need.sizes, found, strict=True):
            if age is None:
                continue
            if not had and 0 < age <= one.reach:
                one.reach = float(age) if math.isinf(one.reach) else (one.reach + age) / 2
            elif 2 * had >= size and age > one.reach:
                one.reach = float(age)

    def forget(self, running: Collection[str]) -> None:
        """Drop what is kept of replicas that are gone."""
        for name in self._replicas.keys() - running:
            for piece in self._replicas.pop(name).sent:
                self._drop(piece, name)
