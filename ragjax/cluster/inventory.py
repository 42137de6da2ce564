"""What the caches of all replicas hold, as if they were one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from heapq import nlargest

from ragjax.core import Holding, Inventory

LATEST = 50
"""Departures and requests that are shown of all replicas together."""

LARGEST = 200
"""Nodes that are shown of all replicas together, as many as of one."""


def merged(seen: Mapping[int, Inventory]) -> Inventory:
    """One inventory of several, by rank. Of the room of a tier the share is that of all replicas together, which are
    alike; nodes are named after their replica, since two may hold the same.
    """
    tokens: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for one in seen.values():
        tokens.update(one.tokens)
        used.update({tier: share / len(seen) for tier, share in one.used.items()})
    # a parent has no fewer tokens below than its child and comes before it, so it is among the largest if the child is
    held = ((holding, rank) for rank, one in seen.items() for holding in one.holdings)
    largest = nlargest(LARGEST, held, key=lambda pair: pair[0].below)
    # the tier is the same for all; one that does not get at it has more to tell
    shared = sorted((one.shared for one in seen.values() if one.shared is not None), key=lambda one: one.on)
    return Inventory(
        policy=next((one.policy for one in seen.values()), ""),
        tokens=dict(tokens),
        used=dict(used),
        nodes=sum(one.nodes for one in seen.values()),
        holdings=tuple(_named(holding, rank) for holding, rank in largest),
        whole=all(one.whole for one in seen.values()),
        departures=tuple(sorted((d for one in seen.values() for d in one.departures), key=lambda d: d.age)[:LATEST]),
        requests=tuple(sorted((r for one in seen.values() for r in one.requests), key=lambda r: r.age)[:LATEST]),
        shared=next(iter(shared), None),
        replicas={str(rank): one for rank, one in seen.items()},
    )


def _named(holding: Holding, rank: int) -> Holding:
    parent = None if holding.parent is None else f"{rank}/{holding.parent}"
    return replace(holding, id=f"{rank}/{holding.id}", parent=parent)
