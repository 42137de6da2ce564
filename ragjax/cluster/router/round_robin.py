"""Each replica in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragjax.cluster.router.base import Router
from ragjax.cluster.router.need import Need


class RoundRobin(Router):
    """Looks at nothing."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Part of `Router`."""
        names = sorted(loads)
        at = self._next % len(names) if names else 0
        self._next += 1
        return (*names[at:], *names[:at])
