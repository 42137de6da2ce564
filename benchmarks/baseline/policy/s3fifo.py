"""S3-FIFO (Yang et al., SOSP 2023), for a cache where only leaves that nobody uses may leave."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from ragjax.cache.node import Node
from ragjax.cache.policy.base import POLICIES, Access, Policy
from ragjax.core.tiers import Tier

SMALL, MAIN = 0, 1
"""The queues."""

SMALL_SHARE = 0.1
"""Of a tier's tokens, how many the small queue is to hold."""

MOST = 3
"""An access count goes no higher (two bits)."""


@dataclass(slots=True)
class Place:
    """A node in one tier: its queue, its number there, and how often it was asked for since it got that number."""

    queue: int
    number: int
    count: int = 0


class Ghosts:
    """Keys of nodes that left the small queue, oldest forgotten first."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0

    def add(self, key: bytes, length: int, room: int) -> None:
        """Remember a node of `length` tokens; what is remembered is at most `room` tokens."""
        self.take(key)
        self._lengths[key] = length
        self._total += length
        while self._total > room:
            self._total -= self._lengths.popitem(last=False)[1]

    def take(self, key: bytes) -> bool:
        """Whether the key was remembered; it no longer is."""
        length = self._lengths.pop(key, None)
        self._total -= length or 0
        return length is not None


@POLICIES.register("s3fifo")
class S3FIFO(Policy):
    """A small queue, in which most nodes are tried and found wanting; a main one, where a node asked for gets another
    round; and ghosts: a node that comes back soon after the small queue dropped it goes to main at once.

    Sizes are tokens, each tier has its own queues, and the tier's size is what stands in them. A node comes into a
    tier when it is first asked for its score. Note: its place in each tier.
    """

    queues = 2

    def __init__(self) -> None:
        self._last = 0
        self._tokens = ([0, 0], [0, 0])
        self._ghosts = (Ghosts(), Ghosts())

    def on_access(self, node: Node, access: Access) -> None:
        """Count, wherever the node is."""
        for place in node.note or ():
            if place is not None:
                place.count = min(place.count + 1, MOST)

    def score(self, node: Node, tier: Tier) -> float:
        """The node's number."""
        return self._place(node, tier).number

    def queue_of(self, node: Node, tier: Tier) -> int:
        """The queue the node stands in."""
        return self._place(node, tier).queue

    def next_queue(self, tier: Tier) -> int:
        """The small queue gives while it holds its share."""
        small, main = self._tokens[tier]
        return SMALL if small >= SMALL_SHARE * (small + main) else MAIN

    def second_chance(self, node: Node, tier: Tier) -> bool:
        """Asked for twice in the small queue: on to main. Asked for in main: once more round."""
        place = self._place(node, tier)
        if place.queue == MAIN and place.count:
            place.count -= 1
        elif place.queue == SMALL and place.count > 1:
            self._count(place, tier, -len(node))
            place.queue, place.count = MAIN, 0
            self._count(place, tier, len(node))
        else:
            return False
        self._last += 1
        place.number = self._last
        return True

    def on_leave(self, node: Node, tier: Tier) -> None:
        """The node gives its place up; out of the small queue it becomes a ghost."""
        place = node.note and node.note[tier]
        if place is None:
            return
        self._count(place, tier, -len(node))
        node.note[tier] = None
        if place.queue == SMALL:
            self._ghosts[tier].add(node.key, len(node), self._room(tier))

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        """Both halves stand where the whole stood."""
        if lower.note is not None:
            upper.note = [place and replace(place) for place in lower.note]

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        """The whole stands where the lower half stood."""
        for tier in (Tier.DEVICE, Tier.HOST):
            for node, tokens in ((upper, -len(upper)), (lower, len(upper))):
                place = node.note and node.note[tier]
                if place is not None:
                    self._count(place, tier, tokens)

    def _room(self, tier: Tier) -> int:
        return int((1 - SMALL_SHARE) * sum(self._tokens[tier]))

    def _count(self, place: Place, tier: Tier, tokens: int) -> None:
        self._tokens[tier][place.queue] += tokens

    def _place(self, node: Node, tier: Tier) -> Place:
        if node.note is None:
            node.note = [None, None]
        place: Place | None = node.note[tier]
        if place is None:
            self._last += 1
            place = Place(MAIN if self._ghosts[tier].take(node.key) else SMALL, self._last)
            node.note[tier] = place
            self._count(place, tier, len(node))
        return place
