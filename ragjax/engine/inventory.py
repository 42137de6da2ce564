"""One tenant's view of the cache: the tree is read in the engine's thread, texts are made in the caller's."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.inventory import Held, Left, head
from ragjax.cache.node import PUBLIC, Node
from ragjax.core import Departure, Holding, Inventory, Sharing, StorageOptions
from ragjax.core.tiers import Tier
from ragjax.engine.loop import Loop
from ragjax.models.tokenizer import Tokenizer
from ragjax.store.disk import DiskStore
from ragjax.store.shared import SharedTier

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
    heads: list[bytes] = []
    departed: list[Left] = []

    def look() -> None:
        listing, left = cache.listing(tenant, most)
        shown = {held.node for held in listing.held}
        departed.extend(left)
        heads.extend(head(held.node) for held in listing.held)
        made.append(
            Inventory(
                policy=storage.policy,
                tokens={tier.label: cache.tree.held[tier][tenant] for tier in (Tier.DEVICE, Tier.HOST)},
                used=_used(cache, disk, shared, storage) if tenant == PUBLIC else {},
                shared=_sharing(shared) if shared is not None and tenant == PUBLIC else None,
                nodes=listing.nodes,
                holdings=tuple(_holding(held, shown) for held in listing.held),
                whole=listing.whole,
                departures=(),
                requests=loop.requests.recent_of(tenant),
            )
        )

    loop.call(look)
    titled = (replace(one, text=_text(raw, tokenizer)) for one, raw in zip(made[0].holdings, heads, strict=True))
    now = time.monotonic()
    departures = tuple(_departure(left, now, tokenizer) for left in departed)
    return replace(made[0], holdings=tuple(titled), departures=departures)


def _holding(held: Held, shown: Collection[Node]) -> Holding:
    node, parent = held.node, held.node.parent
    on_device = node.run is not None and not node.loading
    places = ((Tier.DEVICE, on_device), (Tier.HOST, node.host is not None), (Tier.DISK, node.shelved))
    return Holding(
        id=_id(node),
        parent=_id(parent) if parent is not None and parent in shown else None,
        tokens=len(node),
        below=held.below,
        tiers=tuple(tier.label for tier, there in places if there),
        hits=node.hits,
        in_use=node.pins > 0,
        provenance=str(node.provenance),
        method=node.method,
        text="",
    )


def _id(node: Node) -> str:
    return node.key.hex()[:ID_CHARS]


def _departure(left: Left, now: float, tokenizer: Tokenizer) -> Departure:
    kept = None if left.kept is None else left.kept.label
    return Departure(now - left.at, left.tokens, left.tier.label, kept, _text(left.head, tokenizer))


def _text(raw: bytes, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.pieces(np.frombuffer(raw, "<i4")))


def _sharing(shared: SharedTier) -> Sharing:
    standing = shared.standing()
    return Sharing(standing.address, standing.on, standing.error, standing.entries, standing.bytes)


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
