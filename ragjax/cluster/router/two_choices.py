"""The less loaded of two random replicas.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001. It is what Ray Serve does by default.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ragjax.cluster.router.base import Router
from ragjax.cluster.router.need import Need


class TwoChoices(Router):
    """Looks at loads alone."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Part of `Router`."""
        names = sorted(loads)
        self._random.shuffle(names)
        return (*sorted(names[:2], key=lambda name: loads[name]), *names[2:])
