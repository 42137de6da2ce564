"""Routing of requests to replicas: the pieces of KV that a request needs, and two routers."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, KeysView, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from ragjax.cache.node import digest, raw_of
from ragjax.core import Kind, Prompt, SegmentReport, Tokens
from ragjax.core.registry import Registry

DIGEST = 8
"""Bytes of a digest. Two pieces with the same one cost a hit, never an answer: a cache looks up by its own keys."""


@dataclass(frozen=True)
class Need:
    """A prompt as a router sees it.

    pieces: digests of its segments but for the question, which is computed anyway. chained: whether a piece's KV
    depends on all pieces before it; it then has another digest behind others. sizes: tokens of each. tokens: of the
    whole prompt, int32 [n].
    """

    pieces: tuple[bytes, ...]
    sizes: tuple[int, ...]
    chained: bool
    tokens: Tokens

    @staticmethod
    def of(prompt: Prompt, tenant: str, exact: bool) -> Need:
        """The pieces that a prompt needs.

        exact: its strategy is exact: then chunks are tokens like any others. The paths of a knowledge graph are pieces
        by themselves under any strategy.
        """
        segments = prompt.segments[: -1 if prompt.segments[-1].kind is Kind.QUERY else None]
        chained = exact and not any(segment.kind is Kind.NODE for segment in segments)
        found: list[bytes] = []
        for segment in segments:
            before = found[-1] if chained and found else b"" if segment.public else tenant.encode()
            found.append(digest_of(before, segment.tokens))
        tokens = np.concatenate([segment.tokens for segment in prompt.segments])
        return Need(tuple(found), tuple(map(len, segments)), chained, tokens)

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)


def found_of(prompt: Prompt, reports: Sequence[SegmentReport]) -> list[int]:
    """Tokens that were found of each segment.

    The branches of a graph's tree have one report together (`ragjax/reuse/dependency.py`): each has its part of it.
    """
    if len(reports) == len(prompt.segments):
        return [report.reused for report in reports]
    kinds = (i if segment.kind is not Kind.NODE else -1 for i, segment in enumerate(prompt.segments))
    groups = groupby(zip(kinds, prompt.segments, strict=True), lambda pair: (pair[0], pair[1].id))
    found = []
    for (_, group), report in zip(groups, reports, strict=True):
        found += [len(segment) * report.reused // max(1, report.tokens) for _, segment in group]
    return found


def digest_of(before: bytes, tokens: Tokens) -> bytes:
    return digest(b"router", before, raw_of(tokens))[:DIGEST]


Learn = Callable[[Sequence[int]], None]
"""Takes the tokens of each piece of a request that the replica's cache had."""


class Router(ABC):
    """Decides which replica gets a request. One thread calls it at a time."""

    @abstractmethod
    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Replicas, the best one for the request first. loads: requests that each replica that runs has now."""

    def sent(self, need: Need, replica: str) -> Learn:
        return lambda found: None


ROUTERS: Registry[type[Router]] = Registry("router")
DEFAULT_ROUTER = "knowledge"


def bound(loads: Mapping[str, int], slack: float) -> float:
    """Requests that a replica may have with the one to be placed: `slack` times the mean that there is then.

    "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam, 2018): of 1 or more times the mean some
    replica is always below. One that has a single request may get another in any case.
    """
    return max(2.0, slack * (sum(loads.values()) + 1) / len(loads))


def forget(known: MutableMapping[str, Any], running: Collection[str]) -> None:
    for name in known.keys() - set(running):
        del known[name]


@ROUTERS.register("round-robin")
class RoundRobin(Router):
    def __init__(self) -> None:
        self._next = 0

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        names = sorted(loads)
        at = self._next % len(names) if names else 0
        self._next += 1
        return (*names[at:], *names[:at])


MOST_PIECES = 100_000
"""Pieces that are kept of a replica; the least recently used go first."""
FAR = 2.0
"""A piece is kept until it was last sent so many times the reach ago: what is found beyond the reach corrects it."""


@dataclass
class _Sent:
    reach: float = math.inf  # tokens; see `Memory`
    clock: int = 0  # tokens that the replica was sent
    sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # pieces, the one sent longest ago first


class Memory:
    """The pieces that each replica was sent, by piece, and how far back each replica remembers them.

    A replica's clock counts tokens that it was sent. A piece is believed to be held while the clock has gone on by no
    more than the reach since the piece was last sent. Answers correct the reach: they say of every piece whether it was
    found. So nothing has to be reported, and the cache's tiers, policy and size need not be known; a wrong belief costs
    a hit.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Sent] = {}
        self._sent: dict[bytes, dict[str, int]] = {}
        """Piece to the clocks of replicas when it was last sent to them."""

    def sizes(self) -> Mapping[str, int]:
        return {name: len(one.sent) for name, one in self._replicas.items()}

    def reach(self, replica: str) -> float:
        """Tokens since a piece was sent within which the replica is assumed to hold it."""
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
        one = self._replicas.setdefault(replica, _Sent())
        before = [self._sent.get(piece, {}).get(replica) for piece in need.pieces]
        ages = tuple(None if at is None else one.clock - at for at in before)
        one.clock += need.total
        for piece in need.pieces:
            self._sent.setdefault(piece, {})[replica] = one.clock
            one.sent[piece] = None
            one.sent.move_to_end(piece)
        while one.sent:
            oldest = next(iter(one.sent))
            if len(one.sent) <= MOST_PIECES and one.clock - self._sent[oldest][replica] <= FAR * one.reach:
                break
            del one.sent[oldest]
            self._drop(oldest, replica)
        return ages

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
        for name in self._replicas.keys() - running:
            for piece in self._replicas.pop(name).sent:
                self._drop(piece, name)


SLACK = 2.0
"""A replica that a request would give more than this times the mean of requests does not get it."""
LEAST = 0.1
"""Share of a prompt that a request in progress counts as, at least: what hits the cache is decoded all the same."""
WEIGHT = 0.05
"""Share that one more request has in the mean of tokens that a request computes."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: multiplying by it mixes bits (Knuth, "The Art of Computer Programming", volume 3, 6.4)."""


@ROUTERS.register("knowledge")
class KnowledgeRouter(Router):
    """Sends a request to the replica that has the least to compute before the answer begins: what its cache lacks, and
    what the requests before it compute.

    Like Dynamo's and llm-d's routers it weighs cached tokens against load. They match beginnings of prompts; here the
    cache holds pieces of knowledge, which hit in any order, and the prompt is known before it is routed.

    It believes that a replica holds the pieces it was sent, and corrects that by its answers (`Memory`).

    A piece has a home, by rendezvous hashing (Thaler, Ravishankar, 1998): of replicas with as much to compute, the one
    gets a request that is home to most of its tokens. So each replica comes to hold a part of the knowledge.
    """

    def __init__(self) -> None:
        self._memory = Memory()
        self._computed = 0.0
        """Mean of tokens that a request computes."""
        self._named: KeysView[str] = {}.keys()
        self._names: tuple[str, ...] = ()
        self._seeds_R = np.zeros(0, np.uint64)

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Replicas that are better than the least loaded one, then the others by their load.

        Who holds nothing of the request, and is home to nothing of it, is no better than the least loaded one: so few
        replicas have to be compared.
        """
        self._memory.forget(loads.keys())
        if not loads:
            return ()
        most = bound(loads, SLACK)
        each = max(self._computed, LEAST * need.total)
        held, at_home = self._memory.held(need), self._homes(need, loads.keys())

        def rank(name: str) -> tuple[bool, float, int, str]:
            missing = need.total - held.get(name, 0)
            return loads[name] + 1 > most, missing + loads[name] * each, -at_home.get(name, 0), name

        least = min(loads.values())
        last = rank(min(name for name, load in loads.items() if load == least))
        best = sorted({last, *(one for one in map(rank, {*held, *at_home}) if one < last)})
        first = dict.fromkeys(name for *_, name in best)
        return (*first, *(name for name in sorted(loads, key=loads.__getitem__) if name not in first))

    def sent(self, need: Need, replica: str) -> Learn:
        ages = self._memory.send(need, replica)

        def learn(found: Sequence[int]) -> None:
            self._computed += WEIGHT * (need.total - sum(found) - self._computed)
            self._memory.learn(need, replica, ages, found)

        return learn

    def _homes(self, need: Need, running: KeysView[str]) -> dict[str, int]:
        if self._named != running:
            self._named = dict.fromkeys(sorted(running)).keys()
            self._names = tuple(self._named)
            digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self._names)
            self._seeds_R = np.frombuffer(digests, np.uint64)
        tokens: dict[str, int] = {}
        for piece, size in zip(need.pieces, need.sizes, strict=True):
            draws_R = (self._seeds_R ^ np.frombuffer(piece, np.uint64)) * MIX
            home = self._names[int((draws_R ^ (draws_R >> np.uint64(29))).argmax())]
            tokens[home] = tokens.get(home, 0) + size
        return tokens
