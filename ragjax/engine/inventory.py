"""One tenant's view of the cache: the tree is read in the engine's thread, texts are made in the caller's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from heapq import nlargest

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import HEAD, LeftNode
from ragjax.cache.node import PUBLIC, Node
from ragjax.core import Departure, Holding, Inventory, SharedTierState, StorageOptions
from ragjax.core.tiers import Tier
from ragjax.engine.loop import Loop
from ragjax.models.tokenizer import Tokenizer
from ragjax.store.disk import DiskStore
from ragjax.store.shared import SharedTier

SEEN = 5_000
"""Nodes that one inventory walks over, at most: requests wait meanwhile."""

ID_CHARS = 16
"""Of a node's key, in hexadecimal."""


def inventory_of(
    loop: Loop,
    cache: KnowledgeCache,
    disk: DiskStore | None,
    shared: SharedTier | None,
    storage: StorageOptions,
    tokenizer: Tokenizer,
    tenant: str,
    most: int,
) -> Inventory:
    """List the cache for a tenant; of its nodes the `most` largest.

    Raises:
        ClosedError: if nothing is served any more.
    """
    made: list[Inventory] = []
    departed: list[LeftNode] = []

    def look() -> None:
        sizes, whole = _sizes(cache.tree.root, tenant)
        # a parent has no fewer tokens than its child and comes before it: it is among the largest if the child is
        largest = {node: sizes[node] for node in nlargest(most, sizes, key=sizes.__getitem__)}
        for node in largest:
            cache.on_disk(node)  # it may have left since
        departed.extend(left for left in cache.departures if left.tenant == tenant)
        made.append(
            Inventory(
                policy=storage.policy,
                tokens={tier.label: cache.tree.held[tier][tenant] for tier in (Tier.DEVICE, Tier.HOST)},
                used=_used(cache, disk, shared, storage) if tenant == PUBLIC else {},
                shared=_sharing(shared) if shared is not None and tenant == PUBLIC else None,
                nodes=len(sizes),
                holdings=tuple(_holding(node, largest) for node in largest),
                whole=whole,
                departures=(),
                requests=loop.requests.recent_of(tenant),
            )
        )
        heads.extend(node.raw[: 4 * HEAD] for node in largest)

    heads: list[bytes] = []
    loop.call(look)
    titled = (replace(one, text=_text(raw, tokenizer)) for one, raw in zip(made[0].holdings, heads, strict=True))
    now = time.monotonic()
    departures = tuple(_departure(left, now, tokenizer) for left in departed)
    return replace(made[0], holdings=tuple(titled), departures=departures)


def _sizes(root: Node, tenant: str) -> tuple[dict[Node, int], bool]:
    """Tokens of a tenant's own nodes with all under them, and whether all nodes were looked at; in bounded time."""
    below: dict[Node, int] = {}
    stack, walked = [root], 0
    while stack and walked < SEEN:
        node = stack.pop()
        walked += 1
        if node.tenant == tenant and node is not root:
            below[node] = len(node)
        stack += [child for child in node.children() if child.tenant in (tenant, PUBLIC)]
    for node in reversed(below):
        if node.parent in below:
            below[node.parent] += below[node]
    return below, not stack


def _holding(node: Node, shown: Mapping[Node, int]) -> Holding:
    parent = node.parent
    on_device = node.run is not None and not node.loading
    places = ((Tier.DEVICE, on_device), (Tier.HOST, node.host is not None), (Tier.DISK, node.shelved))
    return Holding(
        id=_id(node),
        parent=_id(parent) if parent is not None and parent in shown else None,
        tokens=len(node),
        below=shown[node],
        tiers=tuple(tier.label for tier, there in places if there),
        hits=node.hits,
        in_use=node.pins > 0,
        provenance=str(node.provenance),
        method=node.method,
        text="",
    )


def _id(node: Node) -> str:
    return node.key.hex()[:ID_CHARS]


def _departure(left: LeftNode, now: float, tokenizer: Tokenizer) -> Departure:
    kept = None if left.kept is None else left.kept.label
    return Departure(now - left.at, left.tokens, left.tier.label, kept, _text(left.head, tokenizer))


def _text(raw: bytes, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.pieces(np.frombuffer(raw, "<i4")))


def _sharing(shared: SharedTier) -> SharedTierState:
    standing = shared.standing()
    return SharedTierState(standing.address, standing.on, standing.error, standing.entries, standing.bytes)


def _used(
    cache: KnowledgeCache, disk: DiskStore | None, shared: SharedTier | None, storage: StorageOptions
) -> dict[str, float]:
    """Share of each tier's room that is taken."""
    used = cache.used
    if disk is not None:
        used[Tier.DISK.label] = disk.stats().bytes / (storage.disk_gb * 2**30)
    if shared is not None:
        standing = shared.standing()
        used[Tier.REMOTE.label] = standing.bytes / standing.max_bytes
    return used
