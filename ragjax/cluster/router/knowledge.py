"""The replica that has the least to compute before the answer begins: what its cache lacks, behind those who wait.

Like Dynamo's and llm-d's routers it weighs cached tokens against load. They match beginnings of prompts; here the cache
holds pieces of knowledge, which hit in any order, and the prompt is known before it is routed.
"""

from __future__ import annotations

import hashlib
from collections.abc import KeysView, Mapping, Sequence

import numpy as np

from ragjax.cluster.router.base import Learn, Router, bound
from ragjax.cluster.router.memory import Memory
from ragjax.cluster.router.need import Need

SLACK = 2.0
"""A replica that a request would give more than this times the mean of requests does not get it."""
LEAST = 0.1
"""Share of a prompt that a request in progress counts as, at least: what hits the cache is decoded all the same."""
WEIGHT = 0.05
"""Share that one more request has in the mean of tokens that a request computes."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd number: multiplying by it mixes bits (Knuth, "The Art of Computer Programming", volume 3, 6.4)."""


class Knowledge(Router):
    """Believes that a replica holds the pieces it was sent, and corrects that by its answers (`Memory`).

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
        """Part of `Router`. Those that are better than the least loaded replica, and the others by their load.

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
        """Part of `Router`."""
        ages = self._memory.send(need, replica)

        def learn(found: Sequence[int]) -> None:
            self._computed += WEIGHT * (need.total - sum(found) - self._computed)
            self._memory.learn(need, replica, ages, found)

        return learn

    def _homes(self, need: Need, running: KeysView[str]) -> dict[str, int]:
        """Tokens of the request that each replica is home to."""
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
