"""Locality-aware cache replacement (DepCache, section 4.2.2, equation 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf, log2

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier

ALPHA = 0.2  # weight of the past (the paper's)
HALF_LIFE = 1000.0  # requests after which one counts half


@dataclass(slots=True, eq=False)
class Demand:
    """Demand of waiting requests for the node with one key. line: this and those for the nodes it was split from."""

    key: bytes  # the node's
    count: int = 0  # waiting requests that want it
    slots: int = 0  # the sum of their slots
    whole: Demand | None = None  # for the node that this one is a part of; who wanted that wants this
    parts: list[Demand] = field(default_factory=list)  # the other way

    def line(self) -> Iterator[Demand]:
        yield self
        if self.whole is not None:
            yield from self.whole.line()

    def names(self) -> Iterator[bytes]:
        yield self.key
        for part in self.parts:
            yield from part.names()


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A waiting request. slot: its rank in the queue plus the number of requests that left the queue before."""

    demands: tuple[Demand, ...]
    slot: int


@POLICIES.register("lacr")
class LACR(Policy):
    """The lowest α · History + (1 - α) · Future leaves first.

    History is the share of the requests so far that used the node since it is kept; a request counts half as much as
    one that came `half_life` requests later (the paper counts all alike: infinity). Future is the share of the queue's
    weight that the requests have which will use the node: the first of n waiting requests weighs n, the last one 1.

    A score is the logarithm of the priority times what all requests so far count together, so History never changes but
    by an access, and nothing overflows. Note: the logarithm of the node's own count. A request that starts costs O(its
    keys), and if it overtakes others, theirs too; one that begins to wait O(keys of all who wait).
    """

    def __init__(self, alpha: float = ALPHA, half_life: float = HALF_LIFE):
        if not 0 < alpha < 1:
            raise ValueError(f"alpha: {alpha} is not between 0 and 1")
        if not half_life > 0:
            raise ValueError(f"half_life: {half_life} requests; it must be positive")
        self._alpha = log2(alpha)
        self._beta = 1 - alpha
        self._step = 1 / half_life
        self._now = 0.0
        self._count = 1.0  # of all requests, in units of the latest; as if there had been one before the first
        self._left = 0
        self._queue: list[str] = []
        self._waiting: dict[str, QueuedRequest] = {}
        self._demands: dict[bytes, Demand] = {}

    def on_access(self, node: Node, access: Access) -> None:
        node.note = self._now if node.note is None else _log_sum(node.note, self._now)

    def score(self, node: Node, tier: Tier) -> float:
        past: float = -inf if node.note is None else self._alpha + node.note
        demand = self._demands.get(node.key)
        first = len(self._queue)
        weight = 0 if demand is None else sum(one.count * (first + self._left) - one.slots for one in demand.line())
        if not weight:
            return past
        whole = first * (first + 1) / 2
        return _log_sum(past, self._now + log2(self._beta * self._count * weight / whole))

    def on_queue(self, request: str, keys: Collection[bytes]) -> Iterable[bytes]:
        if request in self._waiting:
            raise ValueError(f"request: {request!r} waits already")
        demands = tuple(self._demands.setdefault(key, Demand(key)) for key in dict.fromkeys(keys))
        waiting = self._waiting[request] = QueuedRequest(demands, self._left + len(self._queue))
        self._queue.append(request)
        for demand in demands:
            demand.count += 1
            demand.slots += waiting.slot
        return list(self._demands)

    def on_start(self, request: str) -> Iterable[bytes]:
        """The request leaves the queue. Returns the keys that it wanted, and all if it overtook others."""
        self._now += self._step
        self._count = 1 + self._count / 2**self._step
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return ()
        for demand in waiting.demands:
            demand.count -= 1
            demand.slots -= waiting.slot
        rank = self._queue.index(request)
        del self._queue[rank]
        self._left += 1
        for ahead in self._queue[:rank]:  # these keep their ranks
            overtaken = self._waiting[ahead]
            overtaken.slot += 1
            for demand in overtaken.demands:
                demand.slots += 1
        fallen = [key for demand in waiting.demands for key in demand.names()]
        if rank:
            fallen += self._demands
        for demand in waiting.demands:
            self._forget(demand)
        return fallen

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        demand = self._demands.get(key)
        if demand is None:
            return
        for half in (upper, lower):
            part = self._demands.setdefault(half.key, Demand(half.key))
            if part.whole is None:
                part.whole = demand
                demand.parts.append(part)

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        halves = [demand for half in (upper.key, key) if (demand := self._demands.get(half)) is not None]
        named = {demand for half in halves for demand in half.line()}
        wanting = [request for request, waiting in self._waiting.items() if not named.isdisjoint(waiting.demands)]
        if not wanting:
            return
        merged = self._demands.setdefault(lower.key, Demand(lower.key))
        for request in wanting:
            waiting = self._waiting[request]
            if merged in waiting.demands:
                continue
            waiting.demands += (merged,)
            merged.count += 1
            merged.slots += waiting.slot

    def _forget(self, demand: Demand) -> None:
        """Drop what nobody wants; parts of it stand on their own."""
        if demand.count or demand.whole is not None:
            return
        for part in demand.parts:
            part.whole = None
            self._forget(part)
        if self._demands.get(demand.key) is demand:
            del self._demands[demand.key]


def _log_sum(a: float, b: float) -> float:
    low, high = (a, b) if a < b else (b, a)
    return high + log2(1 + 2 ** (low - high))
