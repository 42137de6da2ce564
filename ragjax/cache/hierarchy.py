"""Residence of nodes on the device and in host memory: how they get there, and which leave when room is needed.

Sources: RAGCache, section 5.1 (leaves leave first, a node swapped out once keeps its host copy) and section 6 (hot
upper nodes are replicated); FusionRAG, section 4.2 and Cache-Craft, section 3.5 (three tiers, asynchronous loads).

A node on the device has its parent there; one that is only in host memory has its parent there or on the device. KV
that is only on disk has no node (`loader.py` attaches it). Pages of an evicted node may be written again at once, since
the transfer engine reads them first; those of a loading node are pinned. What never arrives is taken out of the tree
with all that depends on it, and the matches on it are broken.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ragjax.cache.host_memory import HostMemory
from ragjax.cache.match import CacheMetrics, Loads
from ragjax.cache.node import Node, Provenance, context_of
from ragjax.cache.policy.base import Policy, Victims
from ragjax.cache.pool import PagePool
from ragjax.cache.stretches import MOVED
from ragjax.cache.tree import KnowledgeTree
from ragjax.core.tiers import DiskIndex, Inquiry, Record, Tier, TransferEngine

REPLICATE = 2
"""Requests that must have matched a node before it is copied to host memory and disk ahead of its eviction."""

COPIED = 64
"""Nodes that are copied ahead at a time."""

BACKLOG = 2**30
"""Bytes that may wait to be written; what leaves memory while there are more is not put on disk, lest memory fills."""

KEPT = 0.25
"""Share of the device's tokens that a tenant may have kept by name (`Hierarchy.keep`)."""

DEPARTURES = 200
"""Nodes that left a tier lately and are remembered."""

HEAD = 24
"""Tokens by which people are told which node is meant."""


@dataclass(frozen=True)
class Storage:
    transfer: TransferEngine  # moves the bytes
    page_bytes: int  # of a page of the device
    host_bytes: int = 0  # room in host memory (0: none)
    disk_index: DiskIndex | None = None
    quota: Callable[[str], int | None] = lambda tenant: None  # bytes on the device, in whole pages, and in host memory
    inquiry: Inquiry | None = None  # of the shared tier, whose entries the index names too; new KV is put there soon
    disk_bytes: int = 0  # room on disk


class LeftNode(NamedTuple):
    at: float  # `time.monotonic()`
    tenant: str
    head: bytes  # its first tokens, raw
    tokens: int
    tier: Tier
    kept: Tier | None  # where it is now


class Hierarchy:
    def __init__(
        self, tree: KnowledgeTree, pool: PagePool, policy: Policy, metrics: CacheMetrics, storage: Storage | None
    ):
        self.tree = tree
        self.pool = pool
        self.policy = policy
        self.metrics = metrics
        self.storage = storage
        self.disk_index = None if storage is None else storage.disk_index
        self.device = Victims(policy, Tier.DEVICE)
        self.host = Victims(policy, Tier.HOST)
        self.host_memory = HostMemory(storage.transfer if storage is not None else None)
        self.loads = Loads()
        self.departures: deque[LeftNode] = deque(maxlen=DEPARTURES)  # newest first
        self._hot: dict[Node, None] = {}  # in order
        self._new: dict[Node, None] = {}
        self._writing: Counter[bytes] = Counter()  # keys of entries on their way to disk
        self._unflushed: list[Node] | None = None
        self.dead: dict[Node, None] = {}  # out of the tree, and still in use
        self._kept: dict[Node, None] = {}  # leave last, until their time is over
        self._until = math.inf  # the first of these times

    def consider(self, node: Node | None) -> None:
        if node is None or node.loading or node.dead or node.parent is None:
            return
        if node.run is not None and not node.on_device and not node.pins:
            self.device.push(node)
        if node.host is not None and not node.on_host:
            self.host.push(node)

    def make_room(self, pages: int) -> None:
        """Evict until so many pages are free. Nodes whose pages running requests hold leave last."""
        self._expire()
        deferred: dict[Node, None] = {}  # in order; one that a child's leaving queues again comes here twice
        while self.pool.free_pages < pages:
            node = self.device.pop()
            if node is None:
                node = next(iter(deferred))
                del deferred[node]
                self._leave_device(node)
            elif node.run is not None and self.pool.all_pinned(node.run):
                deferred[node] = None
            else:
                self._leave_device(node)
        for node in deferred:
            self.consider(node)
        self.host_memory.dispatch()

    def clear(self) -> None:
        """Drop everything that no match pins, from the device and from host memory; what is on disk stays."""
        while (node := self.device.pop()) is not None:
            self.metrics.evicted_tokens += len(node)
            self._drop(node)
        while (node := self.host.pop()) is not None:
            self._leave_host(node)
        self.policy.on_clear()
        self.host_memory.dispatch()

    def _leave_device(self, node: Node) -> None:
        self.policy.on_evict(node, Tier.DEVICE)
        kept = node.host is not None or self._keep(node)
        self.metrics.evicted_tokens += len(node)
        if not kept:
            self._shelve(node, last=True)
        self._note_departure(node, Tier.DEVICE)
        if not kept:
            self._drop(node)
            return
        self._demote(node)  # only now: making room in host memory may have queued it again
        self.consider(node)
        self.consider(node.parent)

    def _note_departure(self, node: Node, tier: Tier) -> None:
        """A node has left a tier; where it is now says who kept it."""
        memory = (Tier.HOST, node.host) if tier is Tier.DEVICE else (Tier.DEVICE, node.run)
        kept = memory[0] if memory[1] is not None else Tier.DISK if node.shelved else None
        left = LeftNode(time.monotonic(), node.tenant, node.raw[: 4 * HEAD], len(node), tier, kept)
        self.departures.appendleft(left)

    def put_back(self, nodes: Sequence[Node]) -> bool:
        """Take nodes off the device, parents first; False if one is in use or only there."""
        own = set(nodes)
        if any(node.dead or node.host is None or node.pins for node in nodes):
            return False
        if any(child.run is not None and child not in own for node in nodes for child in node.children()):
            return False
        for node in reversed(nodes):
            self._demote(node)
            self.consider(node)
        self.consider(nodes[0].parent)
        return True

    def _demote(self, node: Node) -> None:
        self.device.discard(node)
        self.tree.lift(node)

    def _keep(self, node: Node) -> bool:
        storage = self.storage
        if storage is None or not storage.host_bytes:
            return False
        size = storage.transfer.size(len(node))
        if not self._make_host_room(size, node):
            return False
        if storage.transfer.size(len(node)) != size:
            return self._keep(node)  # a sibling made room, and the node has taken in its parent
        assert node.run is not None and node.parent is not None
        self.tree.store(node, self.host_memory.save(node.run, size, node.tenant))
        self.host.discard(node.parent)
        return True

    def on_disk(self, node: Node) -> bool:
        """Tell if the node's KV is on disk, or on its way there.

        With a shared tier the note of the past is trusted: an entry that left the disk is there, and to ask takes time.
        """
        storage = self.storage
        if storage is None or self.disk_index is None or not node.shelved:
            return False
        if storage.inquiry is None and node.key not in self._writing:
            node.shelved = self.disk_index.find(node.key) is not None
        return node.shelved

    def written(self, key: bytes, error: str | None) -> None:
        self._writing[key] -= 1
        if not self._writing[key]:
            del self._writing[key]
        node = self.tree.find(key)
        if error is not None and node is not None:
            node.shelved = False

    def _shelve(self, node: Node, last: bool = False) -> None:
        """Order a node to be put on disk, if it is not there. last: it leaves memory."""
        storage = self.storage
        if storage is None or storage.disk_index is None or self.on_disk(node):
            return
        if node.method == MOVED:  # found by its tokens alone, wherever they stand, and so in memory alone
            return
        if storage.transfer.backlog > BACKLOG:
            self.metrics.unwritten_tokens += len(node) if last else 0
            return
        copy = node.host
        if copy is None:
            assert node.run is not None
            copy = self.host_memory.save(node.run, 0, node.tenant)  # there only until it is written
        context = context_of(node.parent)
        place = self.tree.place(node.tenant, context, node.radix_method)
        if node.provenance is Provenance.APPROXIMATE:
            place = self.tree.chunk_place(node.tenant, node.method, context, node.raw)
        lossy = node.lossy or storage.transfer.lossy
        record = Record(node.key, place, node.raw, node.provenance, node.method, node.local_start, lossy, node.meta)
        self.host_memory.write(record, copy)
        if node.host is None:
            self.host_memory.leave(copy)
        self._writing[node.key] += 1
        node.shelved = True

    def _drop(self, node: Node) -> None:
        """Take an unpinned node and all below it out of the tree; what host memory has of it may go to disk first."""
        for step in reversed(list(node.subtree())):
            self._unhost(step, last=True)
            if step.run is not None:
                self._demote(step)
            self._forget(step)
        parent = self.tree.detach(node)
        if not self._compress(parent):
            self.consider(parent)

    def remove(self, node: Node) -> None:
        self._lose_copy(node)  # what is not worth its place in memory is not worth one on disk
        self._drop(node)
        self.host_memory.dispatch()

    def _forget(self, node: Node) -> None:
        self.policy.on_forget(node)
        self._kept.pop(node, None)
        self._hot.pop(node, None)
        self._new.pop(node, None)

    def _make_host_room(self, size: int, node: Node) -> bool:
        """Evict from host memory until `size` more bytes fit there, and in the quota of the node's tenant."""
        storage = self.storage
        assert storage is not None
        self._expire()
        quota = storage.quota(node.tenant)
        if size > storage.host_bytes or (quota is not None and size > quota):
            return False
        while quota is not None and self.host_memory.held[node.tenant] + size > quota:
            if (victim := self.host.pop(node.tenant)) is None:
                return False
            self._evict_from_host(victim)
        while self.host_memory.used + size > storage.host_bytes:
            if (victim := self.host.pop()) is None:
                return False
            self._evict_from_host(victim)
        return True

    def _evict_from_host(self, node: Node) -> None:
        self.policy.on_evict(node, Tier.HOST)
        self._leave_host(node, noted=True)

    def _leave_host(self, node: Node, noted: bool = False) -> None:
        """The node leaves host memory, to disk if there is one; without a copy on the device it leaves the tree."""
        self._unhost(node, last=node.run is None)
        if noted:
            self._note_departure(node, Tier.HOST)
        if node.run is None:
            self._drop(node)
        else:
            self.consider(node.parent)

    def _unhost(self, node: Node, last: bool) -> None:
        if node.host is not None:
            self._shelve(node, last)
            self._lose_copy(node)

    def _lose_copy(self, node: Node) -> None:
        copy = node.host
        if copy is None:
            return
        self.host.discard(node)
        self.tree.store(node, None)
        self.host_memory.leave(copy)

    def split(self, node: Node, at: int) -> Node:
        before = node.key
        upper = self.tree.split(node, at)
        if upper.host is not None:
            self.host_memory.share(upper.host)
        if node.loading:
            self.loads.split(upper, node)
        self.policy.on_split(upper, node, before)
        if node.kept:
            upper.kept = node.kept
            self._kept[upper] = None
        if upper.hits >= REPLICATE and self.storage is not None:
            self._hot[upper] = None
        return upper

    def _compress(self, node: Node) -> bool:
        """Merge a dependency node with its only child, where a path no longer branches."""
        child = next(node.children(), None)
        if child is None or child.provenance is not Provenance.DEPENDENCY or node.provenance is not child.provenance:
            return False
        key = child.key
        if not self.tree.merge(child):
            return False
        self.policy.on_merge(node, child, key)
        self._hot.pop(node, None)
        self._new.pop(node, None)
        self.host.discard(node)
        if child.host is not None:
            self.host_memory.leave(child.host)
        self.device.refresh(child)
        self.host.refresh(child)
        return True

    def hold(self, node: Node) -> None:
        self.device.discard(node)
        self.tree.pin(node)

    def let_go(self, node: Node) -> None:
        self.tree.unpin(node)
        if not node.dead:
            self.consider(node)
            return
        for step in node.path():
            if not step.dead:
                self.consider(step)
                return
            if not step.pins:
                self._free(step)

    def invalidate(self, node: Node, error: str) -> None:
        """The node's KV cannot be had: nobody will find it or what depends on it; their pages go when unpinned."""
        below = list(node.subtree())
        self.tree.detach(node)
        for step in below:
            self.device.discard(step)
            self._lose_copy(step)
            self.dead[step] = None
            self._forget(step)
            if not step.pins:
                self._free(step)
        self.loads.break_dead(error)
        self.consider(node.parent)

    def _free(self, node: Node) -> None:
        if node.run is not None and not node.loading:
            self._demote(node)
        if node.run is None:
            self.dead.pop(node, None)

    def lose_entry(self, entry: int) -> None:
        """A host copy was never made; O(nodes), and rare."""
        lost = [node for node in self.tree.nodes() if node.host is not None and node.host.entry == entry]
        for node in lost:
            if node.loading or node.dead or node.host is None:
                continue  # its load will fail by itself; what is dead has gone with its parent
            self._lose_copy(node)
            if node.run is None:
                self.invalidate(node, "its host copy was not made")
            else:
                self.consider(node.parent)

    def keep(self, nodes: Sequence[Node], tenant: str, seconds: float) -> bool:
        """Make nodes leave after all others for so long; False: it is more than a tenant may keep."""
        self._expire()
        held = sum(len(node) for node in {*self._kept, *nodes} if node.tenant == tenant)
        if held > KEPT * self.pool.capacity * self.pool.page_size:
            return False
        until = time.monotonic() + seconds
        for node in nodes:
            node.kept = max(node.kept, until)
            self._kept[node] = None
            self._until = min(self._until, node.kept)
            self.device.refresh(node)
            self.host.refresh(node)
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._until:
            return
        for node in [node for node in self._kept if node.kept <= now]:
            del self._kept[node]
            node.kept = 0.0
            self.device.refresh(node)
            self.host.refresh(node)
        self._until = min((node.kept for node in self._kept), default=math.inf)

    def accessed(self, node: Node) -> None:
        node.hits += 1
        if node.hits == REPLICATE and self.storage is not None:
            self._hot[node] = None

    def admitted(self, nodes: Sequence[Node]) -> None:
        """Nodes are new; a shared tier is to have them soon, since others may be asked for the same."""
        if self.storage is not None and self.storage.inquiry is not None:
            self.write_soon(nodes)

    def write_soon(self, nodes: Sequence[Node]) -> None:
        if self.disk_index is not None:
            self._new.update(dict.fromkeys(nodes))

    def replicate(self) -> bool:
        """Copy hot nodes to host memory and disk (RAGCache, section 6); True if there were any."""
        if self.storage is None or self.storage.transfer.backlog > BACKLOG:
            return False
        hot, new = list(islice(self._hot, COPIED)), list(islice(self._new, COPIED))
        for node in hot:
            self._hot.pop(node, None)  # making room for another may have dropped it
            if not node.dead and not node.loading and node.run is not None:
                if node.host is None and self._keep(node):
                    self.consider(node)
                self._shelve(node)
        for node in new:
            self._new.pop(node, None)
            if not node.dead and not node.loading and (node.run is not None or node.host is not None):
                self._shelve(node)
        self.host_memory.dispatch()
        return bool(hot or new)

    def flush(self, limit: int = 256) -> bool:
        """Order up to `limit` nodes that only memory holds to be put on disk; True if there is more to come.

        Each node is ordered once until none is left, so that calling again ends even where policy or disk refuse.
        """
        if self.storage is None or self.storage.disk_index is None:
            return False
        if self.storage.transfer.backlog > BACKLOG:
            return True
        if self._unflushed is None:
            self._unflushed = list(self.tree.nodes())[::-1]
        left = limit
        while self._unflushed and left:
            node = self._unflushed.pop()
            if node.dead or node.loading or self.on_disk(node):
                continue
            left -= 1
            self._shelve(node)
        if left == limit:
            self._unflushed = None
        self.host_memory.dispatch()
        return left < limit

    def lose_device(self) -> None:
        if len(self.loads):
            raise ValueError("a load is under way: poll until there is none")
        nodes = list(self.tree.nodes())
        for node in reversed(nodes):
            if node.run is not None:
                self._demote(node)
        for node in nodes:
            if not node.dead and node.host is None:
                self._drop(node)
        for node in nodes:
            self.consider(node)
        self.host_memory.dispatch()

    def enforce(self, tenant: str) -> None:
        """Evict the tenant's own nodes from the device until it is within its quota, or all it has is in use."""
        storage = self.storage
        if storage is None or (quota := storage.quota(tenant)) is None:
            return
        pages = self.tree.pages[tenant]
        while len(pages) * storage.page_bytes > quota and (node := self.device.pop(tenant)) is not None:
            self._leave_device(node)
        self.host_memory.dispatch()

    def own(self, tenant: str) -> None:
        if self.storage is not None and self.storage.quota(tenant) is not None:
            self.device.own(tenant)
            self.host.own(tenant)
