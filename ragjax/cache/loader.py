"""Loads to the device: nodes of host memory, and entries of the disk that a look-up attaches to the tree.

A load pins its nodes until its bytes are there. An entry on disk behind a path is looked for by the digest of the
context and the next token, and within entries that begin a few nodes earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ragjax.cache.hierarchy import Hierarchy
from ragjax.cache.match import Loading
from ragjax.cache.node import Node, Provenance, Steps, context_behind, context_of
from ragjax.cache.tree import common_prefix
from ragjax.core import Run
from ragjax.core.tiers import Copy, Load, Record, Save, Tier, Write

CLIMB = 4
"""Last nodes of a path within whose entries on disk a look-up goes on."""


@dataclass(frozen=True)
class _Find:
    """Tokens [begin, end) of an entry on disk, which is the tenant's."""

    record: Record
    begin: int
    end: int
    tenant: str

    def __len__(self) -> int:
        return self.end - self.begin


class Loader:
    def __init__(self, hierarchy: Hierarchy):
        self._hierarchy = hierarchy
        self._loads = hierarchy.loads
        self._tree = hierarchy.tree
        self._pool = hierarchy.pool
        self._storage = hierarchy.storage
        self.allowance: float = inf
        """Pages that loads may still take, besides what the pool has."""

    def load(self, start: Node, steps: Steps, raw: bytes, tenant: str, method: str | None = None) -> Steps:
        """Bring a path to the device: longer by KV that the disk has behind it, shorter where there is no room.

        start: the (pinned) node that the path begins under. raw: the tokens that were looked for, from there on.
        method: of dependency attention, if that is what the path's edges are (None: causal).
        """
        warm = next((i for i, (node, _) in enumerate(steps) if node.run is None), len(steps))
        records = self._continuation(start, steps, raw, tenant, method)
        if warm == len(steps) and not records:
            return steps
        if steps and steps[-1][1] < len(steps[-1][0]) and (records or warm < len(steps)):
            steps[-1] = (self._hierarchy.split(*steps[-1]), steps[-1][1])
        anchor = steps[warm - 1][0] if warm else start
        self._hierarchy.hold(anchor)
        held, room = [node for node, _ in steps[warm:]], self._room
        while held and self._pool.pages_for(sum(map(len, held))) > room:
            held, records = held[:-1], []
        room -= self._pool.pages_for(sum(map(len, held)))
        while records and self._pool.pages_for(sum(map(len, records))) > room:
            records = records[:-1]
        steps = steps[: warm + len(held)]
        if held:
            self._load_held(held)
        if records and len(steps) == warm + len(held):
            steps += self._load_records(held[-1] if held else anchor, records)
        self._hierarchy.let_go(anchor)
        return steps

    def load_record(self, parent: Node, record: Record, tenant: str, behind: bytes = b"") -> Node | None:
        """Attach a keyed entry of the disk below the (pinned) node it was computed on; None if there is no room."""
        if self._pool.pages_for(len(record)) > self._room:
            return None
        return self._load_records(parent, [_Find(record, 0, len(record), tenant)], behind)[0][0]

    def poll(self) -> bool:
        """Take note of finished jobs; True if there were any."""
        if self._storage is None:
            return False
        finished = self._storage.transfer.poll()
        for done in finished:
            self._hierarchy.metrics.count_job(done)
            if isinstance(done.job, Load):
                self._loaded(done.job.number, done.error, done.seconds)
            elif done.error is not None and isinstance(done.job, Save):
                self._hierarchy.lose_entry(done.job.entry)
            elif isinstance(done.job, Write):
                self._hierarchy.written(done.job.record.key, done.error)
        self._loads.note(self._storage.transfer.arrived())
        self._hierarchy.host_memory.dispatch()
        return bool(finished)

    def give_up(self) -> bool:
        """End the loads that nobody waits for any more, for their pages' sake; True if there were any."""
        idle = sorted(self._loads.idle(), reverse=True)  # those behind others first
        for number in idle:
            if number in self._loads.under_way:  # the end of one may have been that of another
                assert self._storage is not None
                self._storage.transfer.give_up(number)
                self._loaded(number, "nobody waits for it any more", given_up=True)
        self._hierarchy.host_memory.dispatch()
        return bool(idle)

    def _loaded(self, number: int, error: str | None, seconds: float = 0.0, given_up: bool = False) -> None:
        loading = self._loads.end(number, seconds if error is None else None)
        deepest = loading.nodes[-1]
        for node in loading.nodes:
            node.loading = 0
        for match in loading.matches:
            match.waits.pop(number, None)
            if error is not None:
                match.broken = error
        self._hierarchy.let_go(deepest)
        first = loading.nodes[0]
        if error is not None and not first.dead and not (given_up and self._hierarchy.put_back(loading.nodes)):
            self._hierarchy.invalidate(first, error)
        if not deepest.dead:
            for node in loading.nodes[:-1]:
                self._hierarchy.consider(node)
        for tenant in {node.tenant for node in loading.nodes}:
            self._hierarchy.enforce(tenant)

    def _continuation(self, start: Node, steps: Steps, raw: bytes, tenant: str, method: str | None) -> list[_Find]:
        """Find entries on disk that continue a path.

        They begin where the path ends, or are entries that begin where one of its last nodes does: a node may be the
        first part of an entry, brought for a prompt that went on in another way.
        """
        found: list[_Find] = []
        disk_index = self._hierarchy.disk_index
        if disk_index is None:
            return found
        at = sum(used for _, used in steps)
        owner = steps[-1][0].tenant if steps else start.tenant
        begins = [at, *(node.start - start.end for node, _ in steps[: -1 - CLIMB : -1])]
        while 4 * at < len(raw):
            finds = [
                _Find(record, at - begin, common, whose)
                for begin in begins
                for whose in dict.fromkeys((tenant, owner))
                for record in disk_index.children(
                    self._tree.place(whose, context_behind(start, raw[: 4 * begin], method), method), raw[4 * begin :]
                )
                if begin + (common := common_prefix(record.tokens, raw[4 * begin :])) > at
            ]
            if not finds:
                break
            best = max(finds, key=len)
            found.append(best)
            at, owner = at + len(best), best.tenant
            begins = [at]
        return found

    def _load_held(self, nodes: list[Node]) -> None:
        assert self._storage is not None
        number = self._loads.number()
        for node in nodes:  # before room is made, so that none of them leaves host memory for it
            self._hierarchy.host.discard(node)
            node.loading = number
        run = self._allocate(sum(map(len, nodes)))
        at = 0
        for node in nodes:
            self._tree.land(node, run.slice(at, at + len(node), self._pool.page_size))
            node.lossy = node.lossy or self._storage.transfer.lossy
            at += len(node)
        copies = tuple(node.host for node in nodes if node.host is not None)
        self._start(Loading(nodes, Tier.HOST), run, copies)

    def _load_records(self, parent: Node, records: list[_Find], behind: bytes = b"") -> Steps:
        number = self._loads.number()
        run = self._allocate(sum(map(len, records)))
        nodes: list[Node] = []
        at = 0
        for find in records:
            record, raw = find.record, find.record.tokens[4 * find.begin : 4 * find.end]
            local_start = record.local_start + find.begin
            node = Node(find.tenant, raw, parent, local_start, Provenance(record.provenance), record.method,
                        behind=behind, meta=record.meta, lossy=record.lossy)  # fmt: skip
            node.loading, node.shelved = number, len(find) == len(record)
            self._hierarchy.own(find.tenant)
            part = run.slice(at, at + len(find), self._pool.page_size)
            self._tree.attach(node, context_of(parent), part)
            nodes.append(node)
            parent, at = node, at + len(find)
        copies = tuple(Copy(find.record.key, find.begin, len(find), find.record) for find in records)
        assert self._storage is not None and self._storage.disk_index is not None
        # whole entries are touched by their nodes' keys, as at every later access
        self._storage.disk_index.touch([f.record.key for f in reversed(records) if len(f) < len(f.record)])
        inquiry = self._storage.inquiry
        remote = inquiry is not None and any(inquiry.serves(find.record.key) for find in records)
        self._start(Loading(nodes, Tier.REMOTE if remote else Tier.DISK), run, copies)
        return [(node, len(node)) for node in nodes]

    @property
    def _room(self) -> float:
        return min(self._pool.reclaimable_pages, self.allowance)

    def _allocate(self, tokens: int) -> Run:
        self.allowance -= self._pool.pages_for(tokens)
        self._hierarchy.make_room(self._pool.pages_for(tokens))
        return self._pool.allocate(tokens)

    def _start(self, loading: Loading, run: Run, copies: tuple[Copy, ...]) -> None:
        assert self._storage is not None
        self._pool.release(run)
        number = loading.nodes[-1].loading
        self._tree.pin(loading.nodes[-1])
        self._loads.begin(number, loading)
        self._storage.transfer.load([Load(number, run, copies)])
        for tenant in {node.tenant for node in loading.nodes}:
            self._hierarchy.enforce(tenant)
