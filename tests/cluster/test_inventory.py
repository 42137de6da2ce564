"""What the caches of several replicas hold, as one inventory."""

from __future__ import annotations

import pytest

from ragjax.cluster.fleet import LARGEST, merged
from ragjax.core import Holding, Inventory, SharedTierState


def holding(name: str, parent: str | None, below: int) -> Holding:
    return Holding(name, parent, 1, below, ("device",), 1, False, "isolated", "naive", "text")


def inventory(holdings: tuple[Holding, ...] = (), shared: SharedTierState | None = None) -> Inventory:
    return Inventory("lru", {"device": 5}, {"device": 0.5}, len(holdings), holdings, True, (), (), shared)


def test_of_many_nodes_the_largest_are_shown_with_their_parents() -> None:
    """Each replica has chains of three nodes, of which none has more tokens than what it hangs under."""
    seen = {}
    for rank in range(3):
        chains = []
        for i in range(50):
            size = 3 * i + rank
            chains += [holding(f"{i}a", None, size), holding(f"{i}b", f"{i}a", size), holding(f"{i}c", f"{i}b", size)]
        seen[rank] = inventory(tuple(sorted(chains, key=lambda one: -one.below)))
    found = merged(seen)
    assert found.nodes == 450 and len(found.holdings) == LARGEST
    sizes = sorted((one.below for each in seen.values() for one in each.holdings), reverse=True)
    assert [one.below for one in found.holdings] == sizes[:LARGEST]
    known: set[str] = set()
    for one in found.holdings:
        assert one.parent is None or one.parent in known
        known.add(one.id)
    assert len(known) == LARGEST


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_replica_without_the_shared_tier_speaks_for_all(ranks: tuple[int, int]) -> None:
    on, off = (
        SharedTierState("redis:6379", True, None, 7, 100),
        SharedTierState("redis:6379", False, "no answer", 7, 100),
    )
    by_rank = dict(zip(ranks, (on, off), strict=True))
    assert merged({rank: inventory(shared=by_rank[rank]) for rank in (0, 1)}).shared == off
    assert merged({0: inventory(shared=on), 1: inventory()}).shared == on
    assert merged({0: inventory()}).shared is None
