"""The replica that was sent the longest beginning of the prompt, as Ray Serve LLM's PrefixCacheAffinityRouter.

Source: Ray's documentation of "prefix-aware routing", thresholds as in its example. Ray compares characters of the
prompt; here they are blocks of tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ragjax.cluster.router.base import Learn, Router, forget, keep
from ragjax.cluster.router.need import Need
from ragjax.cluster.router.two_choices import TwoChoices

IMBALANCE = 5
"""Requests between the fullest and the emptiest queue beyond which loads alone decide."""
MATCH = 0.15
"""Share of the prompt that has to match, at least; else the replica with the smallest tree gets it."""
MOST = 400_000
"""Blocks that are kept of a replica; the least recently used go first."""


class Prefix(Router):
    """Keeps the beginnings that each replica was sent."""

    def __init__(self) -> None:
        self._by_load = TwoChoices()
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Part of `Router`."""
        forget(self._sent, loads)
        by_load = self._by_load.order(need, loads)
        if not loads or max(loads.values()) - min(loads.values()) > IMBALANCE:
            return by_load
        matches = {name: self._match(need, name) for name in loads}
        if max(matches.values()) >= MATCH * max(1, len(need.blocks)):
            return sorted(by_load, key=lambda name: -matches[name])
        return sorted(by_load, key=lambda name: len(self._sent.get(name, ())))

    def _match(self, need: Need, name: str) -> int:
        sent: Mapping[bytes, None] = self._sent.get(name, {})
        return next((i for i, block in enumerate(need.blocks) if block not in sent), len(need.blocks))

    def sent(self, need: Need, replica: str) -> Learn:
        """Part of `Router`."""
        kept = self._sent.setdefault(replica, OrderedDict())
        for block in need.blocks:
            keep(kept, block, None, MOST)
        return super().sent(need, replica)
