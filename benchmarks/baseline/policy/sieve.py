"""SIEVE (Zhang et al., NSDI 2024), for a cache where only leaves that nobody uses may leave."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier

_NUMBERS = 48
"""Bits of a node's number below the lap."""


@dataclass(slots=True)
class Place:
    """A node in the queue of one tier: its number there, and whether it was asked for since the hand met it."""

    number: int
    visited: bool = False


@POLICIES.register("sieve")
class SIEVE(Policy):
    """A hand moves from the oldest node to the newest and round again: it clears the mark of those that were asked
    for and takes the first one that was not. Nodes never change places.

    Order of leaving: (lap, number). What the hand has passed is due in its next lap, everything else (new nodes
    too) in this one. A node comes into a tier's queue when it is first asked for its score; one that the hand passed
    while it could not leave waits for the next lap. Note: its place in each tier.
    """

    def __init__(self) -> None:
        self._last = [0, 0]  # number given
        self._here = [0, 0]  # nodes with a place
        self._ahead = [0, 0]  # of those, how many the hand meets before it is round
        self._lap = [0, 0]
        self._hand = [0, 0]

    def on_access(self, node: Node, access: Access) -> None:
        """Mark the node wherever it is."""
        for place in node.note or ():
            if place is not None:
                place.visited = True

    def score(self, node: Node, tier: Tier) -> float:
        """When the hand comes to the node."""
        number = self._place(node, tier).number
        return (self._lap[tier] + (number <= self._hand[tier]) << _NUMBERS) + number

    def second_chance(self, node: Node, tier: Tier) -> bool:
        """The hand is at the node."""
        place = self._place(node, tier)
        if place.number <= self._hand[tier]:
            self._begin_lap(tier)
        self._hand[tier] = place.number
        self._ahead[tier] -= 1
        visited, place.visited = place.visited, False
        return visited

    def _begin_lap(self, tier: Tier) -> None:
        self._lap[tier] += 1
        self._hand[tier] = 0
        self._ahead[tier] = self._here[tier]

    def on_leave(self, node: Node, tier: Tier) -> None:
        """The node gives its place up."""
        place = node.note and node.note[tier]
        if place is not None:
            self._here[tier] -= 1
            self._ahead[tier] -= place.number > self._hand[tier]
            node.note[tier] = None

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        """Both halves stand where the whole stood."""
        if lower.note is None:
            return
        upper.note = [place and replace(place) for place in lower.note]
        for tier, place in zip(Tier, lower.note, strict=False):
            if place is not None:
                self._here[tier] += 1
                self._ahead[tier] += place.number > self._hand[tier]

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        """The node stands where its lower half stood; the upper half's place is given up."""
        for tier in (Tier.DEVICE, Tier.HOST):
            self.on_leave(upper, tier)

    def _place(self, node: Node, tier: Tier) -> Place:
        if node.note is None:
            node.note = [None, None]
        place: Place | None = node.note[tier]
        if place is None:
            if self._ahead[tier] == 0:  # the hand is round: whoever comes now comes behind all others
                self._begin_lap(tier)
            self._last[tier] += 1
            self._here[tier] += 1
            self._ahead[tier] += 1
            place = node.note[tier] = Place(self._last[tier])
        return place
