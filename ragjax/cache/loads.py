"""Loads under way: the nodes that each brings to the device, and the matches that wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ragjax.cache.match import Match, Progress
from ragjax.cache.node import Node, Steps
from ragjax.core.tiers import Tier


@dataclass
class Loading:
    """A load under way: the nodes it brings (parents first), how far it is, and the matches that wait for it."""

    nodes: list[Node]
    tier: Tier
    progress: Progress = field(default_factory=Progress)
    matches: list[Match] = field(default_factory=list)


FADES = 0.7
"""What the past counts for a tier's pace after each load."""


@dataclass
class Pace:
    """How fast loads from a tier are, from order to end: tokens and seconds, the last loads more than earlier ones."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A load is done."""
        self.tokens = FADES * self.tokens + tokens
        self.seconds = FADES * self.seconds + seconds

    def of(self, tokens: int) -> float | None:
        """Seconds that a load of so many tokens takes; None if there were no loads."""
        return tokens * self.seconds / self.tokens if self.tokens else None


class Loads:
    """Loads under way by number, from 1 on: what `Node.loading` and `Match.waits` name."""

    def __init__(self) -> None:
        self.under_way: dict[int, Loading] = {}
        self._number = 0
        self._pace: dict[Tier, Pace] = defaultdict(Pace)

    def __len__(self) -> int:
        return len(self.under_way)

    def number(self) -> int:
        """The number of a new load."""
        self._number += 1
        return self._number

    def begin(self, number: int, loading: Loading) -> None:
        """A load begins."""
        loading.progress.seconds = self._pace[loading.tier].of(sum(map(len, loading.nodes)))
        self.under_way[number] = loading

    def end(self, number: int, seconds: float | None) -> Loading:
        """A load is no longer under way; it took so many seconds, if all of it arrived."""
        loading = self.under_way.pop(number)
        if seconds is not None:
            self._pace[loading.tier].add(sum(map(len, loading.nodes)), seconds)
        return loading

    def note(self, arrived: Mapping[int, int]) -> None:
        """So many stages of these loads are on the device."""
        for number, stages in arrived.items():
            if number in self.under_way:
                self.under_way[number].progress.stages = stages

    def wait(self, match: Match, steps: Steps) -> tuple[tuple[int, Tier], ...]:
        """Let the match wait for what of its path is under way; returns where each part comes from."""
        origins: list[tuple[int, Tier]] = []
        for node, used in steps:
            tier = Tier.DEVICE
            if node.loading:
                loading = self.under_way[node.loading]
                tier = loading.tier
                if node.loading not in match.waits:
                    match.waits[node.loading] = loading.progress
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
