"""Longest shared prefix (BatchLLM, arXiv 2412.03594; DepCache, section 6.4.2): who shares most runs one after another.

What waits is a trie of segments, and the request that started last is in it too. The next one is below the deepest node
that two or more share; of equally deep ones that which the last one shares, then that which more share, then that of
the oldest request. The cache makes no difference to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from ragjax.schedule.order import ORDERS, Order, W, Waiting


@ORDERS.register("lsp")
class LSP(Order):
    """The one that shares the longest prefix with another; of equals the oldest."""

    def pick(self, queue: Sequence[W], last: Waiting | None) -> W:
        """Without anything shared, the oldest of all."""
        begun: frozenset[Hashable] = frozenset() if last is None else frozenset(last.path)
        shared = Counter(begun)
        for waiting in queue:
            shared.update(waiting.path.keys())
        return max(queue, key=lambda waiting: _share(waiting, shared, begun))


def _share(waiting: Waiting, shared: Counter[Hashable], begun: frozenset[Hashable]) -> tuple[int, bool, int]:
    """Tokens that it shares with another, whether the last one is among these, and how many they are."""
    for name, end in reversed(tuple(waiting.path.items())):  # the deepest first
        if shared[name] > 1:
            return end, name in begun, shared[name]
    return 0, False, 0
