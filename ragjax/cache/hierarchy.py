"""Where nodes lie, device or host memory, how they get there, and who leaves when room is needed.

Sources: RAGCache, section 5.1 (leaves leave first, a node swapped out once keeps its host copy) and section 6 (hot
upper nodes are replicated); FusionRAG, section 4.2 and Cache-Craft, section 3.5 (three tiers, asynchronous loads).

A node on the device has its parent there; one that is only in host memory has its parent there or on the device.
KV that is only on disk has no node: the shelf finds it, and a look-up attaches it while it is loaded. Bytes travel
asynchronously: pages of an evicted node may be written again at once, since the carrier reads them first; the pages
of a loading node are pinned until its bytes are there. What never arrives is condemned: taken out of the tree with
all that depends on it, and the matches on it are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ragjax.cache.keys import context_behind, context_of
from ragjax.cache.match import Match, Metrics
from ragjax.cache.node import Node, Provenance, Steps, name
from ragjax.cache.policy.base import Policy, Victims
from ragjax.cache.pool import AuditError, PagePool
from ragjax.cache.tree import KnowledgeTree, common_prefix
from ragjax.core import Run
from ragjax.core.tiers import Copy, DiskIndex, Done, Load, Record, Save, Tier, TransferEngine, Write

REPLICATE = 2
"""Requests that must have matched a node before it is copied to host memory and disk ahead of its eviction."""

BACKLOG = 2**30
"""Bytes that may wait to be written; what leaves memory while there are more is not put on disk, lest memory fills."""

CLIMB = 4
"""Last nodes of a path within whose entries on disk a look-up goes on."""


@dataclass(frozen=True)
class Storage:
    """The tiers below the device.

    carrier: moves the bytes. host_bytes: room in host memory (0: none). shelf: the index of the disk tier (None: none).
    quota: bytes that a tenant may hold on the device, and in host memory (None: no limit).
    """

    carrier: TransferEngine
    host_bytes: int = 0
    shelf: DiskIndex | None = None
    quota: Callable[[str], int | None] = lambda tenant: None


@dataclass
class _Loading:
    """A load under way: the nodes it brings (parents first) and the matches that wait for it."""

    nodes: list[Node]
    tier: Tier
    matches: list[Match] = field(default_factory=list)


@dataclass(frozen=True)
class _Find:
    """Tokens [begin, end) of an entry on disk, which is the tenant's."""

    record: Record
    begin: int
    end: int
    tenant: str

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass
class _Entry:
    """A host entry: its size, and how many nodes lie in it (a split leaves two)."""

    size: int
    nodes: int = 1


@dataclass
class _Orders:
    """What the carrier will be told at the end of an operation, in this order."""

    saves: list[Save] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)


class Hierarchy:
    """Residence of the tree's nodes."""

    def __init__(self, tree: KnowledgeTree, pool: PagePool, policy: Policy, metrics: Metrics, storage: Storage | None):
        self._tree = tree
        self._pool = pool
        self._policy = policy
        self._metrics = metrics
        self._storage = storage
        self.device = Victims(policy, Tier.DEVICE)
        self.host = Victims(policy, Tier.HOST)
        self._loads: dict[int, _Loading] = {}
        self._entries: dict[int, _Entry] = {}
        self._host_used = 0
        self._number = 0
        self._orders = _Orders()
        self._hot: list[Node] = []
        self._unflushed: list[Node] | None = None
        self._dead: dict[Node, None] = {}

    @property
    def host_used(self) -> int:
        """Bytes of host memory in use."""
        return self._host_used

    @property
    def loading(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def consider(self, node: Node) -> None:
        """Queue a node as one that may leave, where it may."""
        if node.loading or node.dead or node.parent is None:
            return
        if node.run is not None and not node.on_device and not node.pins:
            self.device.push(node)
        if node.host is not None and not node.on_host:
            self.host.push(node)

    # ------------------------------------------------------------------------------------ leaving the device

    def room(self, pages: int) -> None:
        """Evict until so many pages are free; the caller has checked that it can be done.

        Nodes whose pages running requests hold anyway would free nothing: they leave last.
        """
        spared: dict[Node, None] = {}  # in order; one that a child's leaving queues anew comes here twice
        while self._pool.free_pages < pages:
            node = self.device.pop()
            if node is None:
                node = next(iter(spared))
                del spared[node]
                self._leave_device(node)
            elif node.run is not None and self._pool.all_pinned(node.run):
                spared[node] = None
            else:
                self._leave_device(node)
        for node in spared:
            self.consider(node)
        self.dispatch()

    def clear(self) -> None:
        """Drop everything that no match pins, from the device and from host memory; what is on disk stays."""
        while (node := self.device.pop()) is not None:
            self._metrics.evicted_tokens += len(node)
            self._drop(node)
        while (node := self.host.pop()) is not None:
            self._unhost(node)
            if node.run is None:
                self._drop(node)
            else:
                self._consider_parent(node)
        self._policy.on_clear()
        self.dispatch()

    def _leave_device(self, node: Node) -> None:
        kept = node.host is not None or self._keep(node)
        self._metrics.evicted_tokens += len(node)
        if not kept:
            self._shelve(node)
            self._drop(node)
            return
        self._lift(node)  # only now: making room in host memory may have queued it anew
        self.consider(node)
        self._consider_parent(node)

    def _lift(self, node: Node) -> None:
        """The node's pages are given back; it is not queued for them any more."""
        self.device.discard(node)
        self._policy.on_evict(node, Tier.DEVICE)
        self._tree.lift(node)

    def _keep(self, node: Node) -> bool:
        """Order a host copy of a node of the device, if it deserves one and room can be made."""
        storage = self._storage
        if storage is None or not storage.host_bytes or not self._policy.admit(node, Tier.HOST):
            return False
        size = storage.carrier.size(len(node))
        if not self._host_room(size, node):
            return False
        if storage.carrier.size(len(node)) != size:
            return self._keep(node)  # a sibling made room, and the node has taken in its parent
        self._host_used += size
        self._tree.store(node, Copy(self._save(node, size), 0, len(node)))
        assert node.parent is not None
        self.host.discard(node.parent)
        return True

    def _save(self, node: Node, size: int) -> int:
        assert node.run is not None
        self._number += 1
        self._entries[self._number] = _Entry(size)
        self._orders.saves.append(Save(self._number, node.run))
        return self._number

    def _shelve(self, node: Node) -> None:
        """Order a node to be put on disk, if it deserves it and is not there."""
        storage = self._storage
        if storage is None or storage.shelf is None or node.shelved or not self._policy.admit(node, Tier.DISK):
            return
        if storage.carrier.backlog > BACKLOG:
            self._metrics.unwritten_tokens += len(node)
            return
        if node.host is not None:
            self._write(node, node.host)
            return
        entry = self._save(node, 0)  # there only until it is written
        self._write(node, Copy(entry, 0, len(node)))
        self._orders.forgotten.append(entry)
        del self._entries[entry]

    def _write(self, node: Node, copy: Copy) -> None:
        assert self._storage is not None
        context = context_of(node.parent)
        place = self._tree.place(node.tenant, context, node.radix_method)
        if node.provenance is Provenance.APPROXIMATE:
            place = self._tree.chunk_place(node.tenant, node.method, context, node.raw)
        lossy = node.lossy or self._storage.carrier.lossy
        record = Record(node.key, place, node.raw, node.provenance, node.method, node.local_start, lossy, node.meta)
        self._orders.writes.append(Write(record, copy))
        node.shelved = True

    def _drop(self, node: Node) -> None:
        """Take an unpinned node and all below it out of the tree; what host memory has of it may go to disk first."""
        below = list(node.subtree())
        for step in reversed(below):
            self._unhost(step)
            if step.run is not None:
                self._lift(step)
            self._policy.on_forget(step)
        parent = self._tree.detach(node)
        if not self._compress(parent):
            self.consider(parent)

    def remove(self, node: Node) -> None:
        """Take an unpinned leaf out of the tree, unkept."""
        node.shelved = True  # what is not worth its place in memory is not worth one on disk
        self._drop(node)
        self.dispatch()

    # ----------------------------------------------------------------------------------- leaving host memory

    def _host_room(self, size: int, node: Node) -> bool:
        """Evict from host memory until `size` more bytes fit there, and in the quota of the node's tenant."""
        storage = self._storage
        assert storage is not None
        quota = storage.quota(node.tenant)
        if size > storage.host_bytes or (quota is not None and size > quota):
            return False
        while quota is not None and self._held(node.tenant, Tier.HOST) + size > quota:
            if not self._evict_host(self.host.pop(node.tenant)):
                return False
        while self._host_used + size > storage.host_bytes:
            if not self._evict_host(self.host.pop()):
                return False
        return True

    def _held(self, tenant: str, tier: Tier) -> int:
        assert self._storage is not None
        return self._storage.carrier.size(self._tree.held[tier][tenant])

    def _evict_host(self, node: Node | None) -> bool:
        if node is None:
            return False
        self._unhost(node)
        if node.run is None:
            self._drop(node)
        else:
            self._consider_parent(node)
        return True

    def _unhost(self, node: Node) -> None:
        """The node leaves host memory, to disk if there is one that does not have it."""
        copy = node.host
        if copy is None:
            return
        self._shelve(node)
        self._lose_copy(node, copy)

    def _lose_copy(self, node: Node, copy: Copy) -> None:
        self.host.discard(node)
        self._policy.on_evict(node, Tier.HOST)
        self._tree.store(node, None)
        assert isinstance(copy.entry, int)
        entry = self._entries[copy.entry]
        entry.nodes -= 1
        if not entry.nodes:
            del self._entries[copy.entry]
            self._host_used -= entry.size
            self._orders.forgotten.append(copy.entry)

    def _consider_parent(self, node: Node) -> None:
        assert node.parent is not None
        self.consider(node.parent)

    def dispatch(self) -> None:
        """Hand the orders that have come together to the carrier."""
        orders, self._orders = self._orders, _Orders()
        if self._storage is None or not (orders.saves or orders.writes or orders.forgotten):
            return
        if orders.saves:
            self._storage.carrier.save(orders.saves)
        if orders.writes:
            self._storage.carrier.write(orders.writes)
        if orders.forgotten:
            self._storage.carrier.forget(orders.forgotten)

    # -------------------------------------------------------------------------------------- to the device

    def bring(self, start: Node, steps: Steps, raw: bytes, tenant: str, method: str | None = None) -> Steps:
        """Have a path on the device, or on its way there; continued by what the disk has, shortened where no room is.

        start: the (pinned) node that the path begins under. raw: the tokens that were looked for, from there on.
        method: of dependency attention, if that is what the path's edges are (None: causal).
        """
        warm = next((i for i, (node, _) in enumerate(steps) if node.run is None), len(steps))
        records = self._continuation(start, steps, raw, tenant, method)
        if warm == len(steps) and not records:
            return steps
        if steps and steps[-1][1] < len(steps[-1][0]) and (records or warm < len(steps)):
            steps[-1] = (self.split(*steps[-1]), steps[-1][1])
        anchor = steps[warm - 1][0] if warm else start
        self._hold(anchor)
        held, records = self._fit([node for node, _ in steps[warm:]], records)
        steps = steps[: warm + len(held)]
        if held:
            self._load_held(held)
        if records and len(steps) == warm + len(held):
            steps += self._load_records(held[-1] if held else anchor, records)
        self.let_go(anchor)
        return steps

    def bring_record(self, parent: Node, record: Record, tenant: str, behind: bytes = b"") -> Node | None:
        """Attach a keyed entry of the disk below the (pinned) node it was computed on; None if there is no room."""
        if self._pool.pages_for(len(record)) > self._pool.reclaimable_pages:
            return None
        return self._load_records(parent, [_Find(record, 0, len(record), tenant)], behind)[0][0]

    def split(self, node: Node, at: int) -> Node:
        """Cut a node, and return its new upper part."""
        before = node.key
        upper = self._tree.split(node, at)
        if upper.host is not None:
            assert isinstance(upper.host.entry, int)
            self._entries[upper.host.entry].nodes += 1
        if node.loading:
            nodes = self._loads[node.loading].nodes
            nodes.insert(nodes.index(node), upper)
        self._policy.on_split(upper, node, before)
        if upper.hits >= REPLICATE and self._storage is not None:
            self._hot.append(upper)
        return upper

    def _compress(self, node: Node) -> bool:
        """Merge a dependency node with its only child, where a path no longer branches."""
        child = next(node.children(), None)
        if child is None or child.provenance is not Provenance.DEPENDENCY or node.provenance is not child.provenance:
            return False
        if not self._tree.merge(child):
            return False
        self._policy.on_merge(node, child)
        self.host.discard(node)
        if child.host is not None:
            assert isinstance(child.host.entry, int)
            self._entries[child.host.entry].nodes -= 1
        self.device.refresh(child)
        self.host.refresh(child)
        return True

    def _hold(self, node: Node) -> None:
        self.device.discard(node)
        self._tree.pin(node)

    def let_go(self, node: Node) -> None:
        """Undo a pin; what is dead and unused is given back now."""
        self._tree.unpin(node)
        if not node.dead:
            self.consider(node)
            return
        for step in node.path():
            if not step.dead:
                self.consider(step)
                return
            if not step.pins:
                self._bury(step)

    def _continuation(self, start: Node, steps: Steps, raw: bytes, tenant: str, method: str | None) -> list[_Find]:
        """What the disk has behind a path.

        Behind where the path ends, or within entries that begin where one of its last nodes does: a node may be the
        first part of an entry, brought for a prompt that went on in another way.
        """
        found: list[_Find] = []
        if self._storage is None or self._storage.shelf is None:
            return found
        at = sum(used for _, used in steps)
        owner = steps[-1][0].tenant if steps else start.tenant
        begins = [at, *(node.start - start.end for node, _ in steps[: -1 - CLIMB : -1])]
        while 4 * at < len(raw):
            finds = [
                _Find(record, at - begin, common, whose)
                for begin in begins
                for whose in dict.fromkeys((tenant, owner))
                for record in self._entries_at(self._storage.shelf, start, raw, begin, whose, method)
                if begin + (common := common_prefix(record.tokens, raw[4 * begin :])) > at
            ]
            if not finds:
                break
            best = max(finds, key=len)
            found.append(best)
            at, owner = at + len(best), best.tenant
            begins = [at]
        return found

    def _entries_at(
        self, shelf: DiskIndex, start: Node, raw: bytes, begin: int, tenant: str, method: str | None
    ) -> Sequence[Record]:
        """The tenant's entries that begin with token `begin` of what is looked for behind `start`."""
        place = self._tree.place(tenant, context_behind(start, raw[: 4 * begin], method), method)
        return shelf.children(place, int.from_bytes(raw[4 * begin : 4 * begin + 4], "little", signed=True))

    def _fit(self, held: list[Node], records: list[_Find]) -> tuple[list[Node], list[_Find]]:
        """As much of both as there is room for."""
        room = self._pool.reclaimable_pages
        while held and self._pool.pages_for(sum(map(len, held))) > room:
            held, records = held[:-1], []
        room -= self._pool.pages_for(sum(map(len, held)))
        while records and self._pool.pages_for(sum(map(len, records))) > room:
            records = records[:-1]
        return held, records

    def _load_held(self, nodes: list[Node]) -> None:
        """Load nodes that are in host memory, parents first."""
        assert self._storage is not None
        self._number += 1
        for node in nodes:  # before room is made, so that none of them leaves host memory for it
            self.host.discard(node)
            node.loading = self._number
        run = self._allocate(sum(map(len, nodes)))
        at = 0
        for node in nodes:
            self._tree.land(node, run.slice(at, at + len(node), self._pool.page_size))
            node.lossy = node.lossy or self._storage.carrier.lossy
            at += len(node)
        copies = tuple(node.host for node in nodes if node.host is not None)
        self._start(_Loading(nodes, Tier.HOST), run, copies)

    def _load_records(self, parent: Node, records: list[_Find], behind: bytes = b"") -> Steps:
        """Attach entries of the disk as a chain below a pinned node, and load them."""
        self._number += 1
        run = self._allocate(sum(map(len, records)))
        nodes: list[Node] = []
        at = 0
        for find in records:
            record, raw = find.record, find.record.tokens[4 * find.begin : 4 * find.end]
            local_start = record.local_start + find.begin
            node = Node(find.tenant, raw, parent, local_start, Provenance(record.provenance), record.method,
                        behind=behind, meta=record.meta, lossy=record.lossy)  # fmt: skip
            node.loading, node.shelved = self._number, len(find) == len(record)
            self.own(find.tenant)
            part = run.slice(at, at + len(find), self._pool.page_size)
            self._tree.attach(node, context_of(parent), part)
            nodes.append(node)
            parent, at = node, at + len(find)
        copies = tuple(Copy(find.record.key, find.begin, len(find), find.record) for find in records)
        if self._storage is not None and self._storage.shelf is not None:
            # whole entries are touched by their nodes' keys, as at every later access
            self._storage.shelf.touch([f.record.key for f in reversed(records) if len(f) < len(f.record)])
        self._start(_Loading(nodes, Tier.DISK), run, copies)
        return [(node, len(node)) for node in nodes]

    def _allocate(self, tokens: int) -> Run:
        self.room(self._pool.pages_for(tokens))
        return self._pool.allocate(tokens)

    def _start(self, loading: _Loading, run: Run, copies: tuple[Copy, ...]) -> None:
        """The nodes hold the run's pages from here on, and the load pins them."""
        assert self._storage is not None
        self._pool.release(run)
        number = loading.nodes[-1].loading
        self._tree.pin(loading.nodes[-1])
        self._loads[number] = loading
        self._storage.carrier.load([Load(number, run, copies)])
        for tenant in {node.tenant for node in loading.nodes}:
            self.enforce(tenant)

    def wait(self, match: Match, steps: Steps) -> tuple[tuple[int, Tier], ...]:
        """Let the match wait for what of its path is under way; returns where each part comes from."""
        origins: list[tuple[int, Tier]] = []
        for node, used in steps:
            tier = Tier.DEVICE
            if node.loading:
                loading = self._loads[node.loading]
                tier = loading.tier
                if node.loading not in match.waits:
                    match.waits.add(node.loading)
                    loading.matches.append(match)
            if origins and origins[-1][1] is tier:
                used += origins.pop()[0]
            origins.append((used, tier))
        return tuple(origins)

    # --------------------------------------------------------------------------------------- what came back

    def poll(self) -> bool:
        """Take note of finished jobs; whether there were any."""
        if self._storage is None:
            return False
        finished = self._storage.carrier.poll()
        for done in finished:
            self._count(done)
            if isinstance(done.job, Load):
                self._loaded(done.job.number, done.error)
            elif done.error is not None and isinstance(done.job, Save):
                self._lose_entry(done.job.entry)
            elif done.error is not None and isinstance(done.job, Write):
                node = self._tree.find(done.job.record.key)
                if node is not None:
                    node.shelved = False
        self.dispatch()
        return bool(finished)

    def give_up(self) -> bool:
        """End the loads that nobody waits for any more, for their pages' sake; whether there were any."""
        idle = [number for number, load in self._loads.items() if all(match.released for match in load.matches)]
        for number in idle:
            if number in self._loads:  # the end of one may have been that of another
                assert self._storage is not None
                self._storage.carrier.give_up(number)
                self._loaded(number, "nobody waits for it any more")
        self.dispatch()
        return bool(idle)

    def _count(self, done: Done) -> None:
        kind = type(done.job).__name__.lower()
        self._metrics.jobs[kind] += 1
        self._metrics.job_bytes[kind] += done.bytes
        self._metrics.job_seconds[kind] += done.seconds
        self._metrics.failures[kind] += done.error is not None
        self._metrics.loss_max = max(self._metrics.loss_max, done.loss)

    def _loaded(self, number: int, error: str | None) -> None:
        loading = self._loads.pop(number)
        deepest = loading.nodes[-1]
        for node in loading.nodes:
            node.loading = 0
        for match in loading.matches:
            match.waits.discard(number)
            if error is not None:
                match.broken = error
        if error is not None and not loading.nodes[0].dead:
            self.condemn(loading.nodes[0], error)
        self.let_go(deepest)
        if not deepest.dead:
            for node in loading.nodes[:-1]:
                self.consider(node)
        for tenant in {node.tenant for node in loading.nodes}:
            self.enforce(tenant)

    def condemn(self, node: Node, error: str) -> None:
        """The node's KV cannot be had: nobody will find it or what depends on it; their pages go when unpinned."""
        below = list(node.subtree())
        self._tree.detach(node)
        for step in below:
            self.device.discard(step)
            if step.host is not None:
                self._lose_copy(step, step.host)
            self._dead[step] = None
            self._policy.on_forget(step)
            if not step.pins:
                self._bury(step)
        for loading in self._loads.values():
            if loading.nodes[0].dead or loading.nodes[-1].dead:
                for match in loading.matches:
                    match.broken = error
        self._consider_parent(node)

    def _bury(self, node: Node) -> None:
        if node.run is not None and not node.loading:
            self._lift(node)
        if node.run is None:
            self._dead.pop(node, None)

    def _lose_entry(self, entry: int) -> None:
        """A host copy was never made; O(nodes), and rare."""
        lost = [node for node in self._tree.nodes() if node.host is not None and node.host.entry == entry]
        for node in lost:
            if node.loading or node.dead or node.host is None:
                continue  # its load will fail by itself; what is dead has gone with its parent
            self._lose_copy(node, node.host)
            if node.run is None:
                self.condemn(node, "its host copy was not made")
            else:
                self._consider_parent(node)

    # ------------------------------------------------------------------------------- replication and loss

    def accessed(self, node: Node) -> None:
        """A request matched the node; hot ones are noted for replication."""
        node.hits += 1
        if node.hits == REPLICATE and self._storage is not None:
            self._hot.append(node)

    def replicate(self, limit: int = 64) -> bool:
        """Copy hot nodes to host memory, and disk, while there is time (RAGCache, section 6); whether any was."""
        hot, self._hot = self._hot[:limit], self._hot[limit:]
        for node in hot:
            self._replicate(node)
        self.dispatch()
        return bool(hot)

    def _replicate(self, node: Node) -> None:
        """Have a copy of a node of the device in host memory, if there is room, and on disk."""
        if node.dead or node.loading or node.run is None or self._storage is None:
            return
        if node.host is None and self._keep(node):
            self.consider(node)
        self._shelve(node)

    def flush(self, limit: int) -> bool:
        """Order up to `limit` nodes that only memory holds to be put on disk; whether there were any.

        Each node is ordered once until none is left, so that calling again ends even where policy or disk refuse.
        While too much waits to be written nothing is ordered, and there is more to come.
        """
        if self._storage is None or self._storage.shelf is None:
            return False
        if self._storage.carrier.backlog > BACKLOG:
            return True
        if self._unflushed is None:
            self._unflushed = list(self._tree.nodes())[::-1]
        left = limit
        while self._unflushed and left:
            node = self._unflushed.pop()
            if node.dead or node.shelved or node.loading:
                continue
            left -= 1
            self._shelve(node)
        if left == limit:
            self._unflushed = None
        self.dispatch()
        return left < limit

    def lose_device(self) -> None:
        """The pool's content is gone; keep what host memory has. No match and no load may be under way."""
        if self._loads:
            raise ValueError("a load is under way: poll until there is none")
        nodes = list(self._tree.nodes())
        for node in reversed(nodes):
            if node.run is not None:
                self._lift(node)
        for node in nodes:
            if not node.dead and node.host is None:
                self._drop(node)
        for node in nodes:
            self.consider(node)
        self.dispatch()

    def enforce(self, tenant: str) -> None:
        """Evict the tenant's own nodes from the device until it is within its quota, or all it has is in use."""
        quota = self._storage.quota(tenant) if self._storage is not None else None
        if quota is None:
            return
        while self._held(tenant, Tier.DEVICE) > quota and (node := self.device.pop(tenant)) is not None:
            self._leave_device(node)
        self.dispatch()

    def own(self, tenant: str) -> None:
        """Called before the first node of a tenant is kept."""
        if self._storage is not None and self._storage.quota(tenant) is not None:
            self.device.own(tenant)
            self.host.own(tenant)

    # ------------------------------------------------------------------------------------------ audit

    def audit(self, nodes: Sequence[Node]) -> None:
        """Check queues, host entries and loads against the tree; O(nodes)."""
        may = {n for n in nodes if n.run is not None and not (n.on_device or n.pins or n.loading)}
        if may != self.device.nodes():
            raise AuditError("the device's queue of victims is not the set of unpinned leaves")
        may = {n for n in nodes if n.host is not None and not (n.on_host or n.loading)}
        if may != self.host.nodes():
            raise AuditError("the host's queue of victims is not the set of its leaves")
        copies: dict[int, int] = {}
        for node in nodes:
            if node.host is not None:
                assert isinstance(node.host.entry, int)
                copies[node.host.entry] = copies.get(node.host.entry, 0) + 1
        if copies != {number: entry.nodes for number, entry in self._entries.items()}:
            raise AuditError("host entries are not those that nodes lie in")
        self.audit_counts()
        for node in nodes:
            if node.loading and node not in self._loads[node.loading].nodes:
                raise AuditError(f"node {name(node)} waits for a load that does not bring it")

    def audit_counts(self) -> None:
        """Check what can be checked in O(host entries)."""
        if self._host_used != sum(entry.size for entry in self._entries.values()):
            raise AuditError(f"{self._host_used} bytes of host memory are counted")
        if self._storage is not None and self._host_used > self._storage.host_bytes:
            raise AuditError(f"{self._host_used} bytes are in host memory, which has {self._storage.host_bytes}")

    def held_runs(self) -> Iterable[Node]:
        """Nodes outside of the tree that still hold pages."""
        return [node for node in self._dead if node.run is not None]

    def pinned_by_loads(self) -> Iterable[Node]:
        """Deepest node of each load under way."""
        return [loading.nodes[-1] for loading in self._loads.values()]
