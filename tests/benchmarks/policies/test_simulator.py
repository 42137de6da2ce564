"""The simulator against the real cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.policies.cell import modelled, policy_of
from benchmarks.policies.simulator import Block, Simulator, key_of
from benchmarks.policies.source import Forest, Request, Workload
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Storage
from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import LRU, Access, Policy
from ragjax.cache.pool import PagePool
from ragjax.core.tiers import Done, Job, Load, Save, Tier, Write

PROFILE = modelled()


def chains(seed: int, requests: int = 150, system: int = 5) -> Workload:
    """Chains of up to six runs below a system prompt, as RAG prompts are."""
    random, forest = np.random.default_rng(seed), Forest()
    made = []
    top = forest.child(-1, "system", system)
    for _ in range(requests):
        nodes = [top]
        for _ in range(int(random.integers(1, 6))):
            label = int(random.zipf(1.6)) % 7
            nodes.append(forest.child(nodes[-1], label, 1 + (5 * label + len(nodes)) % 6, document=True))
        made.append(Request(tuple(nodes), 0, len(nodes) - 1))
    return forest.workload("chains", made)


def trees(seed: int, requests: int = 120) -> Workload:
    """Whole random subtrees of a random tree."""
    random, forest = np.random.default_rng(seed), Forest()
    for node in range(60):
        forest.child(int(random.integers(-1, node)) if node else -1, node, int(random.integers(1, 8)), document=True)
    made = []
    for _ in range(requests):
        chosen: set[int] = set()
        for leaf in random.integers(60, size=4):
            while leaf >= 0:
                chosen.add(int(leaf))
                leaf = forest.parents[leaf]
        made.append(Request(tuple(sorted(chosen)), 2, len(chosen)))
    return forest.workload("trees", made)


class Instant:
    """A transfer engine whose jobs are done at once; counts tokens."""

    lossy = False

    def __init__(self) -> None:
        self.moved = 0
        self._done: list[Done] = []

    def size(self, tokens: int) -> int:
        return tokens

    def save(self, jobs: Sequence[Save]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def write(self, jobs: Sequence[Write]) -> None:
        self._finish(jobs, 0)

    def load(self, jobs: Sequence[Load]) -> None:
        self._finish(jobs, sum(job.run.length for job in jobs))

    def forget(self, entries: object) -> None:
        """Nothing is kept."""

    def poll(self) -> Sequence[Done]:
        done, self._done = self._done, []
        return done

    def arrived(self) -> Mapping[int, int]:
        return {}

    def _finish(self, jobs: Sequence[Job], tokens: int) -> None:
        self.moved += tokens
        self._done += [Done(job) for job in jobs]


def replay(work: Workload, policy: Policy, device: int, host: int, lookahead: int) -> tuple[list[int], int]:
    """The same requests through the real cache, a token a page: tokens hit by each, and tokens moved in all."""
    transfer = Instant()
    cache = KnowledgeCache(b"x", PagePool(device + 1, 1), policy, Storage(transfer, 1, host) if host else None)
    hits, announced = [], 0
    prompts = []
    for request in work.requests:
        tokens = np.repeat(np.array(request.nodes, np.int32), [work.sizes[n] for n in request.nodes])
        prompts.append((tokens, tuple(np.cumsum([work.sizes[n] for n in request.nodes]).tolist())))
    for at, (tokens, cuts) in enumerate(prompts):
        for ahead in range(announced, min(at + lookahead + 1, len(prompts))):
            cache.announce(str(ahead), cache.keys_of(*prompts[ahead]))
        announced = max(announced, at + lookahead + 1)
        cache.withdraw(str(at))
        match = cache.matcher.match_prefix(tokens)
        cache.poll()
        hits.append(match.length)
        if match.length < len(tokens):
            run = cache.reserve(len(tokens) - match.length)
            cache.admitter.admit_prefix(match, tokens, match.length, run, cuts)
            cache.free(run)
        match.release()
        cache.poll()
    cache.audit(live=())
    return hits, transfer.moved


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_simulator_decides_as_the_real_cache_does(name: str, seed: int) -> None:
    work = chains(seed)
    served = Simulator(work, POLICIES[name].for_device(PROFILE), 60).run(lookahead=8)
    hits, _ = replay(work, POLICIES[name].for_device(PROFILE), 60, 0, lookahead=8)
    assert [one.hit for one in served] == hits
    assert 0 < sum(hits) < sum(work.totals)


@pytest.mark.parametrize("name", POLICIES)
def test_two_tiers_hit_and_move_much_as_in_the_real_cache(name: str) -> None:
    """Not the same to the token: the real one replicates hot nodes, and tells apart what a load and a match hold."""
    work = chains(2, requests=300)
    served = Simulator(work, POLICIES[name].for_device(PROFILE), 50, 150).run(lookahead=8)
    hits, moved = replay(work, POLICIES[name].for_device(PROFILE), 50, 150, lookahead=8)
    assert sum(one.hit for one in served) == pytest.approx(sum(hits), rel=0.03)
    assert sum(one.moved for one in served) == pytest.approx(moved, rel=0.1)


@pytest.mark.parametrize("host", [0, 90])
@pytest.mark.parametrize("name", [*POLICIES, "belady"])
@pytest.mark.parametrize("make", [chains, trees])
def test_the_books_of_the_simulator_add_up(make: Any, name: str, host: int) -> None:
    work = make(3)
    simulator = Simulator(work, policy_of(name, work, PROFILE), 70, host)
    for at in range(len(work.requests)):
        served = simulator.serve(at, lookahead=8)
        simulator.audit()
        assert 0 <= served.hit <= work.totals[at] - work.requests[at].other
        assert served.moved == 0 or host


def test_the_audit_sees_a_block_above_its_parent() -> None:
    simulator = Simulator(chains(0), LRU(), 1000, 1000)
    simulator.serve(0)
    blocks: dict[int, Block] = simulator._blocks
    leaf = next(block for block in blocks.values() if not block.children)
    leaf.there[Tier.DEVICE] = False
    with pytest.raises(AssertionError):
        simulator.audit()


def test_a_request_larger_than_the_device_is_kept_in_part() -> None:
    work = chains(4, requests=30)
    simulator = Simulator(work, LRU(), 8)
    hits = [simulator.serve(at).hit for at in range(len(work.requests))]
    simulator.audit()
    assert 5 <= max(hits) <= 8


def test_host_memory_serves_what_left_the_device_and_copies_it_once() -> None:
    forest = Forest()
    made = [Request((forest.child(-1, label, 10),)) for label in (0, 1, 0, 1, 0)]
    served = Simulator(forest.workload("turns", made), LRU(), 10, 20).run()
    assert [one.hit for one in served] == [0, 0, 10, 10, 10]
    # out; out and in; in alone, since the copies are there
    assert [one.moved for one in served] == [0, 10, 20, 10, 10]


def test_queue_and_lookahead_reach_the_policy_in_order() -> None:
    class Listener(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def on_queue(self, request: str, keys: Any) -> Sequence[bytes]:
            assert keys == [key_of(n) for n in work.requests[int(request)].nodes]
            self.heard.append(f"+{request}")
            return ()

        def on_start(self, request: str) -> Sequence[bytes]:
            self.heard.append(f"-{request}")
            return ()

    work, policy = chains(0, requests=4), Listener()
    Simulator(work, policy, 100).run(lookahead=2)
    assert policy.heard == ["+0", "+1", "+2", "-0", "+3", "-1", "-2", "-3"]


def test_accesses_say_what_the_request_hit_and_computed() -> None:
    class Listener(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Access] = []

        def on_access(self, node: Any, access: Access) -> None:
            super().on_access(node, access)
            self.heard.append(access)

    forest, policy = Forest(), Listener()
    top = forest.child(-1, "system", 5)
    made = [Request((top, forest.child(top, label, 10)), other=3) for label in (0, 1)]
    Simulator(forest.workload("two", made), policy, 100).run()
    computed, hit = [Access(False, 0, 18)] * 2, Access(True, 5, 13)
    assert policy.heard == [*computed, hit, Access(False, 5, 13)]


def test_a_score_that_fell_is_read_again() -> None:
    class Fickle(Policy):
        fallen = b""

        def score(self, node: Any, tier: Tier) -> float:
            return -1.0 if node.key == self.fallen else float(node.number)

        def on_start(self, request: str) -> Sequence[bytes]:
            self.fallen = key_of(1) if request == "2" else b""
            return [key_of(1)]

    forest = Forest()
    made = [Request((forest.child(-1, label, 10),)) for label in (0, 1, 2, 0, 1)]
    served = Simulator(forest.workload("turns", made), Fickle(), 20).run()
    assert [one.hit for one in served] == [0, 0, 0, 10, 0]  # 1 left for 2, though it stood behind 0


def test_copies_below_a_block_that_is_forgotten_go_too() -> None:
    class Picky(LRU):
        def admit(self, node: Any, tier: Tier) -> bool:
            return bool(node.number != 0)

    forest = Forest()
    top = forest.child(-1, "top", 10)
    made = [Request((top, forest.child(top, "below", 10))), Request((forest.child(-1, "other", 20),))]
    simulator = Simulator(forest.workload("three", [*made, made[0]]), Picky(), 20, 100)
    served = simulator.run()
    simulator.audit()
    assert [one.hit for one in served] == [0, 0, 0]


@pytest.mark.parametrize(("device", "host"), [(0, 0), (5, -1)])
def test_capacities_must_hold_something(device: int, host: int) -> None:
    with pytest.raises(ValueError, match="device must hold at least 1 token"):
        Simulator(chains(0), LRU(), device, host)
