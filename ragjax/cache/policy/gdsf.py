"""Greedy-Dual-Size-Frequency (Cherkasova, HP Labs 1998), as RAGCache compares itself with (section 7.3,
arXiv:2404.12457): the cost of a node is proportional to its size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Lasting
from ragjax.cache.profile import Profile
from ragjax.core.tiers import Tier

WINDOW = 1_000_000
"""Accesses of nodes over which a frequency is counted."""


@dataclass(slots=True)
class Worth:
    """Statistics of a node. They outlive it, and count every request for it, whether it was kept then or not."""

    frequency: int = 0  # accesses in window number `window`, in which the last one fell
    window: int = 0
    clocks: tuple[float, float] = (0.0, 0.0)  # of device and host at the last access
    rate: float = 1.0  # cost per token, the mean over the `misses` that told it
    misses: int = 0


@POLICIES.register("gdsf")
class GDSF(Lasting):
    """The lowest Clock + Frequency × Cost / Size leaves first; here Cost / Size is 1.

    Each tier has a clock: the highest priority among the nodes that were evicted from it. A node's own is set when it
    is accessed, so what nobody asks for falls behind. Time is counted in accesses of nodes and cut into windows of
    `window`; a frequency is that of the window of the node's last access, so that the past wears off.
    """

    def __init__(self, window: int = WINDOW):
        if window < 1:
            raise ValueError(f"window: {window} accesses; at least 1 is needed")
        super().__init__()
        self._window = window
        self._accesses = 0
        self._clocks = (0.0, 0.0)

    def on_access(self, node: Node, access: Access) -> None:
        worth = self._recall(node)
        if worth is None:
            worth = node.note = Worth()
        window = self._accesses // self._window
        self._accesses += 1
        worth.frequency = worth.frequency + 1 if worth.window == window else 1
        worth.window = window
        worth.clocks = self._clocks

    def score(self, node: Node, tier: Tier) -> float:
        worth = node.note
        if worth is None:
            return 0.0
        priority: float = worth.clocks[tier] + worth.frequency * worth.rate
        return priority

    def on_evict(self, node: Node, tier: Tier) -> None:
        device, host = self._clocks
        priority = self.score(node, tier)
        self._clocks = (max(device, priority), host) if tier is Tier.DEVICE else (device, max(host, priority))

    def on_clear(self) -> None:
        super().on_clear()
        self._clocks = (0.0, 0.0)

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        super().on_split(upper, lower, key)
        if lower.note is not None:
            upper.note = replace(lower.note)


@POLICIES.register("pgdsf")
class PGDSF(GDSF):
    """Prefix-aware GDSF (RAGCache, section 5.1 and Algorithm 1), with a measured Cost / Size.

    It is the mean of T(cached, new) / new over the requests that met the node uncached.
    A request's whole cost is thus spread over all the tokens that it had to compute. A node that nobody was seen to
    compute (it came from disk) counts as computed alone, behind its context.
    """

    def __init__(self, profile: Profile, window: int = WINDOW):
        super().__init__(window)
        self._profile = profile
        self._latest = (0, 1, profile.cost(0, 1))

    @classmethod
    def for_device(cls, profile: Profile, **settings: Any) -> PGDSF:
        return cls(profile, **settings)

    def on_access(self, node: Node, access: Access) -> None:
        super().on_access(node, access)
        worth = node.note
        if not access.hit and access.new > 0:
            rate = self._rate(access.cached, access.new)
            worth.rate = (worth.rate * worth.misses + rate) / (worth.misses + 1)
            worth.misses += 1
        elif not worth.misses and worth.frequency == 1 and len(node):
            worth.rate = self._rate(node.start, len(node))

    def _rate(self, cached: int, new: int) -> float:
        if self._latest[:2] != (cached, new):
            self._latest = (cached, new, self._profile.cost(cached, new) / new)
        return self._latest[2]
