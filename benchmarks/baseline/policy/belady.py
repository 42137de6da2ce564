"""Belady's MIN (IBM Systems Journal 5, 1966): unlimited foresight, for simulators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ragjax.cache.node import Node
from ragjax.cache.policy.base import Policy
from ragjax.core.tiers import Tier


class Belady(Policy):
    """The node whose next use is farthest ahead leaves first; needs no note.

    future: the keys that each request will use, in the order in which `on_start` will be called for them.
    """

    def __init__(self, future: Sequence[Collection[bytes]]):
        self._future = future
        self._now = 0
        self._uses: dict[bytes, list[int]] = defaultdict(list)  # requests, the next one last
        for number in range(len(future), 0, -1):
            for key in set(future[number - 1]):
                self._uses[key].append(number)

    def on_start(self, request: str) -> Iterable[bytes]:
        """The next request of the future starts.

        Raises:
            ValueError: if none was foreseen.
        """
        if self._now == len(self._future):
            raise ValueError(f"request {request!r} starts after all {self._now} of the future did")
        keys = set(self._future[self._now])
        self._now += 1
        for key in keys:
            self._uses[key].pop()
        return keys

    def score(self, node: Node, tier: Tier) -> float:
        """Minus the number of the request that uses it next."""
        uses = self._uses.get(node.key)
        return -uses[-1] if uses else float("-inf")
