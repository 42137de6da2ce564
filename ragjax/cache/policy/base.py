"""The interface of replacement policies, and the queue of nodes that may leave a tier.

The cache decides which nodes can leave (leaves nobody uses); a policy only orders them. To add one: a subclass of
`Policy` that overrides what it needs, registered by `@POLICIES.register("name")`, in any module that is imported.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ragjax.cache.node import Node
from ragjax.cache.profile import Profile
from ragjax.core.errors import ConfigError
from ragjax.core.registry import Registry
from ragjax.core.tiers import Tier


@dataclass(frozen=True, slots=True)
class Access:
    hit: bool  # the node was cached; if not, the request computed it and it is admitted now
    cached: int  # tokens of the request that were cached
    new: int  # tokens of the request that had to be computed
    cfo: float = 1.0  # cache fixing overhead, in [0, 1] (Cache-Craft, section 3.2); 1 if nobody measured it


class Policy:
    """Orders nodes: the one with the lowest score leaves first. By default every node is worth the same.

    What a policy remembers of a node it keeps in `node.note`, which is None at first and nobody else's. Scores may
    rise unnoticed (the queue reads them again before a node leaves); one that falls must be told by `on_access` of
    the node itself, or by `on_queue` or `on_start`.
    """

    @classmethod
    def for_device(cls, profile: Profile, **settings: Any) -> Policy:
        return cls(**settings)

    def on_access(self, node: Node, access: Access) -> None: ...

    def score(self, node: Node, tier: Tier) -> float:
        return 0.0

    def on_evict(self, node: Node, tier: Tier) -> None: ...

    def on_forget(self, node: Node) -> None: ...

    def on_clear(self) -> None: ...

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        """The node with this key was cut in two; `upper`, new, is its first part and has the note of `lower`."""

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        """`lower`, which had this key, has taken in its parent `upper`, which is no more."""

    def on_queue(self, request: str, keys: Collection[bytes]) -> Iterable[bytes]:
        """A request that will use these keys, kept or not, began to wait. Returns the keys whose scores fell."""
        return ()

    def on_start(self, request: str) -> Iterable[bytes]:
        """The request waits no more; returns the keys whose scores fell."""
        return ()


POLICIES: Registry[type[Policy]] = Registry("policy")


def make_policy(text: str, profile: Profile) -> Policy:
    """A policy by its name and settings, such as "lacr:alpha=0.2,half_life=inf"."""
    kind, settings = POLICIES.configured(text)
    try:
        return kind.for_device(profile, **settings)
    except ValueError as error:
        raise ConfigError(f"policy {text}: {error}") from error


@POLICIES.register("lru")
class LRU(Policy):
    """The node whose last access is longest ago leaves first. Note: the tick of that access."""

    def __init__(self) -> None:
        self._tick = 0

    def on_access(self, node: Node, access: Access) -> None:
        self._tick += 1
        node.note = self._tick

    def score(self, node: Node, tier: Tier) -> float:
        return node.note or 0


class Victims:
    """The nodes that may leave one tier, lowest score first; O(log n) per call, stale entries dropped lazily.

    An entry is good while its serial number is the one its node remembers.
    """

    def __init__(self, policy: Policy, tier: Tier = Tier.DEVICE):
        self._policy = policy
        self._tier = tier
        self._heap: list[tuple[float, int, Node]] = []
        self._owned: dict[str, list[tuple[float, int, Node]]] = {}
        self._serial = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def own(self, tenant: str) -> None:
        """From now on (before any of its nodes is queued) `pop(tenant)` is asked for too."""
        self._owned.setdefault(tenant, [])

    def push(self, node: Node) -> None:
        self.discard(node)
        self._serial += 1
        self._live += 1
        node.queued[self._tier] = self._serial
        entry = (self._score(node), self._serial, node)
        heaps = [self._heap]
        if node.tenant in self._owned:
            heaps.append(self._owned[node.tenant])
        for heap in heaps:
            heapq.heappush(heap, entry)
            if len(heap) > 2 * self._live + 64:
                heap[:] = [e for e in heap if self._good(e)]
                heapq.heapify(heap)

    def discard(self, node: Node) -> None:
        self._live -= node.queued[self._tier] != 0
        node.queued[self._tier] = 0

    def refresh(self, node: Node) -> None:
        if node.queued[self._tier]:
            self.push(node)

    def pop(self, tenant: str | None = None) -> Node | None:
        """The node to leave next (of a tenant that was named by `own`), no longer queued; None if there is none."""
        heap = self._heap if tenant is None else self._owned[tenant]
        while heap:
            entry = heapq.heappop(heap)
            node = entry[2]
            if not self._good(entry):
                continue
            if self._score(node) > entry[0]:
                self.push(node)
                continue
            self.discard(node)
            return node
        return None

    def _score(self, node: Node) -> float:
        return math.inf if node.kept else self._policy.score(node, self._tier)

    def nodes(self) -> set[Node]:
        return {entry[2] for entry in self._heap if self._good(entry)}

    def _good(self, entry: tuple[float, int, Node]) -> bool:
        return entry[2].queued[self._tier] == entry[1]


GHOSTS_PER_NODE = 4
FEWEST, MOST = 10_000, 1_000_000
"""Ghosts that may be kept: four for each node that is kept, within these bounds."""


class Lasting(Policy):
    """Keeps the note of a node that left every tier, and gives it back when the node with this key returns.

    A node that comes back cut in other places has another key and starts without a note. Documents are cut at the
    segments of prompts, so they keep theirs; the parts of a question that splits do not.
    """

    def __init__(self) -> None:
        self._ghosts: OrderedDict[bytes, Any] = OrderedDict()
        self._kept = 0

    def _recall(self, node: Node) -> Any:
        """The note of an accessed node: its own, its ghost's, or None, and then the caller sets one."""
        if node.note is None:
            self._kept += 1
            node.note = self._ghosts.pop(node.key, None)
        return node.note

    def on_forget(self, node: Node) -> None:
        if node.note is None:
            return
        self._kept -= 1
        self._ghosts[node.key], node.note = node.note, None
        while len(self._ghosts) > min(MOST, max(FEWEST, GHOSTS_PER_NODE * self._kept)):
            self._ghosts.popitem(last=False)

    def on_split(self, upper: Node, lower: Node, key: bytes) -> None:
        self._kept += upper.note is not None

    def on_merge(self, upper: Node, lower: Node, key: bytes) -> None:
        self._kept -= upper.note is not None

    def on_clear(self) -> None:
        self._ghosts.clear()
