"""Replicas without a model: each has a cache of pieces, least recently used first out, and serves one at a time."""

from __future__ import annotations

import heapq
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random

import numpy as np

from benchmarks.baseline.router import keep
from benchmarks.policies.source import Pattern, Workload
from ragjax.cluster.router import DIGEST, Need, Router


@dataclass(frozen=True)
class Setting:
    """What is simulated. A trace (`traced`) has requests of its own, and blocks in the place of chunks."""

    pattern: Pattern
    replicas: int
    chunks: int = 20_000  # of the knowledge
    tokens: int = 160  # of a chunk
    per_request: int = 4  # chunks, in random order
    room: int = 1_000  # chunks that a replica holds
    topic: int = 1  # chunks that belong together; 1: a request draws each by itself
    requests: int = 500  # for each replica
    busy: float = 0.7  # share of their time that replicas would be at work if nothing were found
    token_s: float = 1e-4  # to compute a token
    base_s: float = 0.03  # of a request besides

    def interval_s(self, served: Sequence[Need]) -> float:
        """Mean seconds between two arrivals."""
        mean = sum(need.total for need in served) / len(served)
        return (self.base_s + mean * self.token_s) / self.busy / self.replicas


@dataclass
class Replica:
    """One cache, and when the replica is done with what it has."""

    room: int
    free_at: float = 0.0
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def look_up(self, need: Need) -> list[int]:
        """Tokens found of each piece; all of them are held afterwards."""
        found = [size if piece in self.held else 0 for piece, size in zip(need.pieces, need.sizes, strict=True)]
        if need.chained and 0 in found:
            whole = found.index(0)
            found[whole:] = [0] * (len(found) - whole)
        # the end of a chain goes first: without its beginning it is of no use
        for piece in reversed(need.pieces):
            keep(self.held, piece, None, self.room)
        return found


@dataclass
class Outcome:
    """What was seen, of the second half of the requests."""

    found: int = 0
    asked: int = 0
    waits_s: list[float] = field(default_factory=list)
    uneven: list[float] = field(default_factory=list)
    """Fullest queue over the mean, at each arrival with at least one request a replica."""
    decide_us: list[float] = field(default_factory=list)
    state_bytes: int = 0  # what the router keeps at the end


def needs(setting: Setting, seed: int = 0) -> Iterator[Need]:
    """The requests: a chunk strategy's, so that order does not matter to a cache that knows pieces."""
    random = np.random.default_rng(seed)
    count = setting.requests * setting.replicas
    draws = 1 if setting.topic > 1 else setting.per_request
    for drawn in setting.pattern.draw(setting.chunks // setting.topic, draws, count, seed):
        near = drawn[0] * setting.topic + np.arange(setting.topic) if setting.topic > 1 else drawn
        chunks = random.permutation(near)[: setting.per_request]
        # a chunk's tokens are its number: enough to tell beginnings apart
        tokens = np.repeat(chunks.astype(np.int32), setting.tokens)
        pieces = tuple(int(chunk).to_bytes(DIGEST, "little") for chunk in chunks)
        yield Need(pieces, (setting.tokens,) * len(pieces), False, tokens)


def traced(trace: Workload) -> list[Need]:
    """The requests of a trace of prefixes, in its order; not when they came. A block's tokens are its number."""
    found = []
    for request in trace.requests:
        sizes = tuple(trace.sizes[node] for node in request.nodes)
        pieces = tuple(node.to_bytes(DIGEST, "little") for node in request.nodes)
        found.append(Need(pieces, sizes, True, np.repeat(np.array(request.nodes, np.int32), sizes)))
    return found


def size_of(value: object, seen: set[int]) -> int:
    """Bytes of a router, and of all that it holds and is not in `seen`: ids of objects that are counted already."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = chain(value.keys(), value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = value
    elif not isinstance(value, (type, Random)):
        parts = getattr(value, "__dict__", {}).values()
    return sys.getsizeof(value) + sum(size_of(part, seen) for part in parts)


def simulate(setting: Setting, served: Sequence[Need], router: Router, seed: int = 0) -> Outcome:
    """Serve the requests, as `needs` makes them."""
    random = np.random.default_rng(seed + 1)
    names = [f"replica-{i}" for i in range(setting.replicas)]
    replicas = {name: Replica(setting.room) for name in names}
    loads, outcome = dict.fromkeys(names, 0), Outcome()
    ends: list[tuple[float, int, str]] = []
    now, half, interval_s = 0.0, len(served) // 2, setting.interval_s(served)
    for number, need in enumerate(served):
        now += random.exponential(interval_s)
        while ends and ends[0][0] <= now:
            loads[heapq.heappop(ends)[2]] -= 1
        began = time.perf_counter()
        name = router.order(need, loads)[0]
        router.sent(need, name)
        spent = time.perf_counter() - began
        replica = replicas[name]
        found = replica.look_up(need)
        start = max(now, replica.free_at)
        replica.free_at = start + setting.base_s + (need.total - sum(found)) * setting.token_s
        loads[name] += 1
        heapq.heappush(ends, (replica.free_at, number, name))
        if number >= half:
            outcome.found += sum(found)
            outcome.asked += need.total
            outcome.waits_s.append(replica.free_at - now)
            outcome.decide_us.append(spent * 1e6)
            if (waiting := sum(loads.values())) >= len(names):
                outcome.uneven.append(max(loads.values()) * len(names) / waiting)
    outcome.state_bytes = size_of(router, set())
    return outcome
