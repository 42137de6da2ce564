"""One tenant's view of the cache: the tree is read in the engine's thread, texts are made in the caller's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from heapq import nlargest

import numpy as np

from ragjax.cache.hierarchy import HEAD, LeftNode
from ragjax.cache.node import PUBLIC, Node
from ragjax.core import Departure, Holding, Inventory, StorageOptions
from ragjax.core.tiers import Tier
from ragjax.engine.build import Parts
from ragjax.engine.loop import Loop

SEEN = 5_000  # nodes that one inventory walks over, at most: requests wait meanwhile
ID_CHARS = 16  # of a node's key, in hexadecimal


def inventory_of(loop: Loop, parts: Parts, storage: StorageOptions, tenant: str, most: int) -> Inventory:
    cache, shared = parts.cache, parts.shared if tenant == PUBLIC else None

    def look() -> tuple[Inventory, list[bytes], list[LeftNode]]:
        sizes, whole = _sizes(cache.tree.root, tenant)
        # a parent has no fewer tokens than its child and comes before it: it is among the largest if the child is
        largest = {node: sizes[node] for node in nlargest(most, sizes, key=sizes.__getitem__)}
        for node in largest:
            cache.on_disk(node)  # it may have left since
        standing = None if shared is None else shared.standing()
        used = cache.used if tenant == PUBLIC else {}
        if used and parts.disk is not None:
            used[Tier.DISK.label] = parts.disk.stats().bytes / (storage.disk_gb * 2**30)
        if standing is not None and standing.max_bytes:
            used[Tier.REMOTE.label] = standing.bytes / standing.max_bytes
        made = Inventory(
            policy=storage.policy,
            tokens={tier.label: cache.tree.held[tier][tenant] for tier in (Tier.DEVICE, Tier.HOST)},
            used=used,
            shared=standing,
            nodes=len(sizes),
            holdings=tuple(_holding(node, largest) for node in largest),
            whole=whole,
            departures=(),
            requests=loop.requests.recent_of(tenant),
        )
        left = [one for one in cache.departures if one.tenant == tenant]
        return made, [node.raw[: 4 * HEAD] for node in largest], left

    made, heads, left = loop.call(look)

    def text(raw: bytes) -> str:
        return "".join(parts.tokenizer.pieces(np.frombuffer(raw, "<i4")))

    holdings = tuple(replace(one, text=text(raw)) for one, raw in zip(made.holdings, heads, strict=True))
    departures, now = [], time.monotonic()
    for one in left:
        kept = None if one.kept is None else one.kept.label
        departures.append(Departure(now - one.at, one.tokens, one.tier.label, kept, text(one.head)))
    return replace(made, holdings=holdings, departures=tuple(departures))


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
        id=node.key.hex()[:ID_CHARS],
        parent=parent.key.hex()[:ID_CHARS] if parent is not None and parent in shown else None,
        tokens=len(node),
        below=shown[node],
        tiers=tuple(tier.label for tier, there in places if there),
        hits=node.hits,
        in_use=node.pins > 0,
        provenance=str(node.provenance),
        method=node.method,
        text="",
    )
