"""What a tenant may see of the tree, in bounded time, and what left lately. Texts are made elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

from ragjax.cache.node import PUBLIC, Node
from ragjax.core.tiers import Tier

SEEN = 5_000
"""Nodes that one look walks over, at most: requests wait meanwhile."""

KEPT = 200
"""Departures that are remembered."""

HEAD = 24
"""Tokens that tell what a node is about."""


class Held(NamedTuple):
    """A node that is shown. below: tokens of it and of all nodes under it."""

    node: Node
    below: int


class Listing(NamedTuple):
    """A tenant's own nodes: how many, those of most tokens, and whether all were walked over."""

    nodes: int
    held: list[Held]
    whole: bool


class Left(NamedTuple):
    """A node that left a tier. at: `time.monotonic()`. head: its first tokens, as raw bytes. kept: who has it now."""

    at: float
    tenant: str
    head: bytes
    tokens: int
    tier: Tier
    kept: Tier | None


class Departures:
    """What left lately by the policy's choice, newest first."""

    def __init__(self) -> None:
        self._left: deque[Left] = deque(maxlen=KEPT)

    def add(self, node: Node, tier: Tier) -> None:
        """A node has left a tier; where it is now says who kept it."""
        memory = (Tier.HOST, node.host) if tier is Tier.DEVICE else (Tier.DEVICE, node.run)
        kept = memory[0] if memory[1] is not None else Tier.DISK if node.shelved else None
        self._left.appendleft(Left(time.monotonic(), node.tenant, head(node), len(node), tier, kept))

    def of(self, tenant: str) -> list[Left]:
        """Those of one tenant."""
        return [left for left in self._left if left.tenant == tenant]


def head(node: Node) -> bytes:
    """The first tokens of a node, raw."""
    return node.raw[: 4 * HEAD]


def listing(root: Node, tenant: str, most: int) -> Listing:
    """A tenant's own nodes, `most` of them at most; a node is shown with its parent. Public ones are of no tenant."""
    below: dict[Node, int] = {}
    walked = 0
    for node in _visible(root, tenant):
        walked += 1
        if walked > SEEN:
            break
        if node.tenant == tenant and node is not root:
            below[node] = len(node)
    for node in reversed(below):
        if node.parent in below:
            below[node.parent] += below[node]
    # a parent has no fewer tokens than its child and comes before it, so it is among the largest if the child is
    largest = nlargest(most, below, key=below.__getitem__)
    return Listing(len(below), [Held(node, below[node]) for node in largest], walked <= SEEN)


def _visible(root: Node, tenant: str) -> Iterator[Node]:
    """Nodes of the tenant, and public ones that may have such below; parents first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack += [child for child in node.children() if child.tenant in (tenant, PUBLIC)]
