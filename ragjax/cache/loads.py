"""Loads under way: the nodes that each brings to the device, and the matches that wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ragjax.cache.match import Match
from ragjax.cache.node import Node, Steps
from ragjax.core.tiers import Tier


@dataclass
class Loading:
    """A load under way: the nodes it brings (parents first) and the matches that wait for it."""

    nodes: list[Node]
    tier: Tier
    matches: list[Match] = field(default_factory=list)


class Loads:
    """Loads under way by number, from 1 on: what `Node.loading` and `Match.waits` name."""

    def __init__(self) -> None:
        self.under_way: dict[int, Loading] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self.under_way)

    def number(self) -> int:
        """The number of a new load."""
        self._number += 1
        return self._number

    def wait(self, match: Match, steps: Steps) -> tuple[tuple[int, Tier], ...]:
        """Let the match wait for what of its path is under way; returns where each part comes from."""
        origins: list[tuple[int, Tier]] = []
        for node, used in steps:
            tier = Tier.DEVICE
            if node.loading:
                loading = self.under_way[node.loading]
                tier = loading.tier
                if node.loading not in match.waits:
                    match.waits.add(node.loading)
                    loading.matches.append(match)
            if origins and origins[-1][1] is tier:
                used += origins.pop()[0]
            origins.append((used, tier))
        return tuple(origins)

    def split(self, upper: Node, lower: Node) -> None:
        """A node that is under way was cut: its load brings both halves."""
        nodes = self.under_way[lower.loading].nodes
        nodes.insert(nodes.index(lower), upper)

    def break_dead(self, error: str) -> None:
        """Break the matches that wait for nodes which have left the tree."""
        for loading in self.under_way.values():
            if loading.nodes[0].dead or loading.nodes[-1].dead:
                for match in loading.matches:
                    match.broken = error

    def idle(self) -> list[int]:
        """Numbers of the loads that nobody waits for any more."""
        return [number for number, load in self.under_way.items() if all(match.released for match in load.matches)]

    def pinned(self) -> Iterable[Node]:
        """Deepest node of each load."""
        return [loading.nodes[-1] for loading in self.under_way.values()]
