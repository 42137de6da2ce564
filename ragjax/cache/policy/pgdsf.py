"""Prefix-aware Greedy-Dual-Size-Frequency (RAGCache, section 5.1 and Algorithm 1, arXiv:2404.12457)."""

from __future__ import annotations

from ragjax.cache.node import Node
from ragjax.cache.policy.base import Access
from ragjax.cache.policy.gdsf import GDSF, WINDOW
from ragjax.cache.profile import Profile


class PGDSF(GDSF):
    """GDSF with Cost / Size measured: mean of T(cached, new) / new over the requests that met the node uncached.

    A request's whole cost is thus spread over all the tokens that it had to compute. A node that nobody was seen to
    compute (it came from disk) counts as computed alone, behind its context.
    """

    def __init__(self, profile: Profile, window: int = WINDOW):
        super().__init__(window)
        self._profile = profile
        self._latest = (0, 1, profile.cost(0, 1))

    def on_access(self, node: Node, access: Access) -> None:
        """Count, set the node's clocks, and learn its cost from a miss (formula 3)."""
        super().on_access(node, access)
        worth = node.note
        if not access.hit and access.new > 0:
            rate = self._rate(access.cached, access.new)
            worth.rate = (worth.rate * worth.misses + rate) / (worth.misses + 1)
            worth.misses += 1
        elif not worth.misses and worth.frequency == 1 and len(node):
            worth.rate = self._rate(node.start, len(node))

    def _rate(self, cached: int, new: int) -> float:
        """Seconds per new token; asked for every node of a request in turn, looked up once."""
        if self._latest[:2] != (cached, new):
            self._latest = (cached, new, self._profile.cost(cached, new) / new)
        return self._latest[2]
