"""Routing of requests to replicas: the pieces of KV that a request needs, and two routers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ragjax.cache.node import digest, raw_of
from ragjax.core import Kind, Prompt, Tokens
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


def digest_of(before: bytes, tokens: Tokens) -> bytes:
    return digest(b"router", before, raw_of(tokens))[:DIGEST]


class Router(ABC):
    """Decides which replica gets a request. One thread calls it at a time."""

    @abstractmethod
    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Replicas, the best one for the request first. loads: requests that each replica that runs has now."""

    def sent(self, need: Need, replica: str) -> None:  # noqa: B027 # some have nothing to remember
        """Note that a replica has the request."""


ROUTERS: Registry[type[Router]] = Registry("router")
DEFAULT_ROUTER = "knowledge"


def bound(loads: Mapping[str, int], slack: float) -> float:
    """Requests that a replica may have with the one to be placed: `slack` times the mean that there is then.

    "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam, 2018): of 1 or more times the mean some
    replica is always below. One that has a single request may get another in any case.
    """
    return max(2.0, slack * (sum(loads.values()) + 1) / len(loads))


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
"""Pieces that are remembered; the ones sent longest ago go first."""
HOLDERS = 4
"""Replicas that a piece is believed to be held by, at most: those that it was last sent to."""
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

    It believes that a piece is held by the replicas that it was last sent to. So nothing has to be reported, and the
    cache's tiers, policy and size need not be known; a wrong belief costs a hit.

    A piece has a home, by rendezvous hashing (Thaler, Ravishankar, 1998): of replicas with as much to compute, the one
    gets a request that is home to most of its tokens. So each replica comes to hold a part of the knowledge.
    """

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._computed = 0.0
        """Mean of tokens that a request computes, as is believed when it is sent."""
        self._named: KeysView[str] = {}.keys()
        self._names: tuple[str, ...] = ()
        self._seeds_R = np.zeros(0, np.uint64)

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Replicas that are better than the least loaded one, then the others by their load.

        Who holds nothing of the request, and is home to nothing of it, is no better than the least loaded one: so few
        replicas have to be compared.
        """
        if not loads:
            return ()
        most = bound(loads, SLACK)
        each = max(self._computed, LEAST * need.total)
        held, at_home = self._held(need), self._homes(need, loads.keys())

        def rank(name: str) -> tuple[bool, float, int, str]:
            missing = need.total - held.get(name, 0)
            return loads[name] + 1 > most, missing + loads[name] * each, -at_home.get(name, 0), name

        least = min(loads.values())
        last = rank(min(name for name, load in loads.items() if load == least))
        near = (name for name in {*held, *at_home} if name in loads)
        best = sorted({last, *(one for one in map(rank, near) if one < last)})
        first = dict.fromkeys(name for *_, name in best)
        return (*first, *(name for name in sorted(loads, key=loads.__getitem__) if name not in first))

    def sent(self, need: Need, replica: str) -> None:
        missing = need.total - self._held(need).get(replica, 0)
        self._computed += WEIGHT * (missing - self._computed)
        for piece in need.pieces:
            others = (name for name in self._holders.get(piece, ()) if name != replica)
            self._holders[piece] = (replica, *others)[:HOLDERS]
            self._holders.move_to_end(piece)
        while len(self._holders) > MOST_PIECES:
            self._holders.popitem(last=False)

    def _held(self, need: Need) -> dict[str, int]:
        """Tokens of the request that are believed to be held, by the replicas that hold some.

        A piece of a chain was sent with all pieces before it: who holds it holds them.
        """
        found: dict[str, int] = {}
        before = 0
        for piece, size in zip(need.pieces, need.sizes, strict=True):
            for name in self._holders.get(piece, ()):
                found[name] = size + (before if need.chained else found.get(name, 0))
            before += size
        return found

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
