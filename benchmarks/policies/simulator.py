"""A cache of token runs on one or two tiers, without tokens, pages or bytes: what a policy decides, and nothing else.

It keeps the rules of `ragjax.cache` with the same policies and the same queues of victims: a run is useless without the
one it hangs under, so only leaves leave a tier and a parent is never colder than its child; what a request uses stays
until it ends; a run copied to host memory once keeps its copy, so that the next eviction copies nothing (RAGCache,
section 5.1). A test replays the same requests through the real cache. Here a decision is a few dictionary look-ups, so
that traces of millions of tokens take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.policies.source import Workload
from ragjax.cache.lookahead import Look
from ragjax.cache.policy.base import Access, Policy, Victims
from ragjax.core.tiers import Tier
from ragjax.schedule.order import FCFS, Order, Queue, Waiting

LOOKAHEAD = 32  # requests that wait behind the one being served


@dataclass(slots=True, eq=False)
class Block:
    """A run that lies in some tier; offers policies what a node of the real tree does.

    below: its children that lie on the device, and in host memory. children: all of them, by number.
    """

    number: int
    size: int
    start: int
    parent: Block | None
    key: bytes
    tenant: str = ""
    note: Any = None
    kept: float = 0.0
    queued: list[int] = field(default_factory=lambda: [0] * 2)
    there: list[bool] = field(default_factory=lambda: [False] * 2)
    below: list[int] = field(default_factory=lambda: [0] * 2)
    children: dict[int, Block] = field(default_factory=dict)
    pinned: bool = False

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class Served:
    """hit: tokens found in any tier. documents: of the retrieved ones, how many were found. moved: tokens copied.

    seconds: that all the decisions of this request took.
    """

    hit: int
    documents: int
    moved: int
    seconds: float


@dataclass(eq=False)
class Arrival(Waiting):
    """A waiting request of a workload."""

    number: int = -1


class Simulator:
    """Serves requests of a workload one by one from `device` tokens, backed by `host` tokens.

    generated: tokens of an answer; with them, what a request computes takes room while it is served, kept or not.
    """

    def __init__(self, work: Workload, policy: Policy, device: int, host: int = 0, *, generated: int = 0):
        if device < 1 or host < 0:
            raise ValueError(f"device must hold at least 1 token and host 0, not {device} and {host}")
        self._work = work
        self._generated = generated
        self._policy: Any = policy  # Any here and below: a block is a node as far as policies and queues look
        self._keys = [key_of(n) for n in range(len(work.sizes))]
        self._blocks: dict[int, Block] = {}
        self._free = {Tier.DEVICE: device, Tier.HOST: host}
        self._size = dict(self._free)
        self._victims: dict[Tier, Any] = {tier: Victims(policy, tier) for tier in self._free}
        self._moved = 0
        self._announced = 0
        self.sequence: list[int] = []

    def run(self, lookahead: int = LOOKAHEAD, order: Order | None = None) -> list[Served]:
        """Serve all requests; at any time `lookahead` of them are known to wait, and `order` chooses who is next.

        Returns what became of each, in the order of their arrival; `sequence` has the numbers as they were served.
        """
        queue: Queue[Arrival] = Queue(order or FCFS())
        served: dict[int, Served] = {}
        while len(served) < len(self._work.requests):
            begin = time.perf_counter()
            for at in self._announce(min(len(served) + lookahead + 1, len(self._work.requests))):
                queue.add(self._arrival(at))
            chosen = queue.next()
            assert chosen is not None
            queue.start(chosen)
            served[chosen.number] = self._serve(chosen.number, begin)
        self.sequence = list(served)
        return [served[at] for at in range(len(served))]

    def serve(self, at: int, lookahead: int = LOOKAHEAD) -> Served:
        """Serve request number `at`; they come in order."""
        begin = time.perf_counter()
        self._announce(min(at + lookahead + 1, len(self._work.requests)))
        return self._serve(at, begin)

    def _arrival(self, at: int) -> Arrival:
        nodes = self._work.requests[at].nodes
        return Arrival(total=self._work.totals[at], look=partial(self._look, nodes), number=at)

    def _look(self, nodes: tuple[int, ...]) -> Look:
        kept: dict[bytes, int] = {}
        missing: dict[bytes, int] = {}
        for n in nodes:
            (kept if n in self._blocks else missing)[self._keys[n]] = self._work.sizes[n]
        return Look(kept, missing)

    def _serve(self, at: int, begin: float) -> Served:
        moved = self._moved
        for key in self._policy.on_start(str(at)):
            self._refresh(key)
        request = self._work.requests[at]
        found = [block for n in request.nodes if (block := self._blocks.get(n)) is not None]
        hit = sum(block.size for block in found)
        new = self._work.totals[at] - hit
        documents = sum(self._work.documents[block.number] for block in found)
        self._touch(found, Access(True, hit, new))
        self._load(found)
        own = request.other + self._generated if self._generated else 0
        made = self._admit(request.nodes, Access(False, hit, new), own)
        if request.answer >= 0:
            made += self._admit((request.answer,), Access(False, hit, new))
        self._release(found + made)
        return Served(hit, documents, self._moved - moved, time.perf_counter() - begin)

    def _announce(self, until: int) -> range:
        """Requests up to `until` wait; returns the numbers of those that did not before."""
        new = range(self._announced, until)
        for at in new:
            for key in self._policy.on_queue(str(at), [self._keys[n] for n in self._work.requests[at].nodes]):
                self._refresh(key)
        self._announced = max(self._announced, until)
        return new

    def _refresh(self, key: bytes) -> None:
        block = self._blocks.get(int.from_bytes(key, "little"))
        if block is not None:
            for victims in self._victims.values():
                victims.refresh(block)

    def _touch(self, found: list[Block], access: Access) -> None:
        for block in found:
            block.pinned = True
            for victims in self._victims.values():
                victims.discard(block)
        for block in found:
            self._policy.on_access(block, access)

    def _load(self, found: list[Block]) -> None:
        for block in found:
            if not block.there[Tier.DEVICE] and self._can_place(block.parent, block.size):
                self._put(block, Tier.DEVICE)
                self._moved += block.size

    def _admit(self, nodes: Sequence[int], access: Access, own: int = 0) -> list[Block]:
        """Keep what was computed; what does not fit beside the rest of the request is dropped.

        own: tokens that need room only now.
        """
        made: list[Block] = []
        missing = own + sum(self._work.sizes[n] for n in nodes if n not in self._blocks)
        self._make_room(Tier.DEVICE, min(missing, self._size[Tier.DEVICE]))  # for all at once, as `reserve` does
        for n in nodes:
            above = self._work.parents[n]
            parent = self._blocks.get(above)
            size = self._work.sizes[n]
            if n in self._blocks or (above >= 0 and parent is None) or not self._can_place(parent, size):
                continue
            block = Block(
                n, size, 0 if parent is None else parent.start + parent.size, parent, self._keys[n], pinned=True
            )
            self._blocks[n] = block
            if parent is not None:
                parent.children[n] = block
            self._put(block, Tier.DEVICE)
            self._policy.on_access(block, access)
            made.append(block)
        return made

    def _release(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.pinned = False
        for block in blocks:
            for tier in self._victims:
                self._consider(block, tier)

    def _can_place(self, parent: Block | None, size: int) -> bool:
        return (parent is None or parent.there[Tier.DEVICE]) and self._make_room(Tier.DEVICE, size)

    def _make_room(self, tier: Tier, size: int) -> bool:
        if size > self._size[tier]:
            return False
        while self._free[tier] < size:
            block = self._victims[tier].pop()
            if block is None:
                return False
            self._policy.on_evict(block, tier)
            self._leave(block, tier)
        return True

    def _put(self, block: Block, tier: Tier) -> None:
        block.there[tier] = True
        self._free[tier] -= block.size
        if block.parent is not None:
            block.parent.below[tier] += 1
            self._victims[tier].discard(block.parent)

    def _leave(self, block: Block, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            self._save(block)
        self._victims[tier].discard(block)
        block.there[tier] = False
        self._free[tier] += block.size
        if block.parent is not None:
            block.parent.below[tier] -= 1
            self._consider(block.parent, tier)
        if not any(block.there):
            self._forget(block)

    def _save(self, block: Block) -> None:
        """Copy a run that leaves the device, unless host memory has it or no room for it."""
        if block.there[Tier.HOST]:
            return
        if self._make_room(Tier.HOST, block.size):
            self._put(block, Tier.HOST)
            self._moved += block.size
            self._consider(block, Tier.HOST)

    def _forget(self, block: Block) -> None:
        """Take out a run that lies nowhere, and copies below it, which are useless now."""
        for child in list(block.children.values()):
            self._leave_below(child)
        del self._blocks[block.number]
        self._policy.on_forget(block)
        if block.parent is not None:
            del block.parent.children[block.number]

    def _leave_below(self, block: Block) -> None:
        for child in list(block.children.values()):
            self._leave_below(child)
        self._leave(block, Tier.HOST)

    def _consider(self, block: Block, tier: Tier) -> None:
        if block.there[tier] and not block.pinned and not block.below[tier]:
            self._victims[tier].push(block)

    def audit(self) -> None:
        """Check the books; O(blocks).

        Raises:
            AssertionError: naming what is wrong.
        """
        for tier, victims in self._victims.items():
            there = {block for block in self._blocks.values() if block.there[tier]}
            assert self._free[tier] == self._size[tier] - sum(map(len, there)) >= 0, f"{tier.label}: cells are lost"
            leaves = {block for block in there if not block.below[tier] and not block.pinned}
            assert leaves == victims.nodes(), f"{tier.label}: the queue is not the set of leaves"
            for block in there:
                below = sum(child.there[tier] for child in block.children.values())
                assert block.below[tier] == below, f"{tier.label}: block {block.number} miscounts its children"
        for block in self._blocks.values():
            assert any(block.there), f"block {block.number} lies nowhere"
            above = block.parent
            if above is None:
                continue
            assert self._blocks.get(above.number) is above, f"block {block.number} hangs under nothing"
            assert above.there[Tier.DEVICE] or not block.there[Tier.DEVICE], f"block {block.number} is above its parent"


def key_of(node: int) -> bytes:
    return node.to_bytes(32, "little")
