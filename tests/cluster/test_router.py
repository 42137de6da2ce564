"""Routers: where requests go, by what replicas hold and how many they have."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from benchmarks.baseline.router import IMBALANCE, PrefixRouter, TwoChoices
from ragjax.cluster.router import FAR, LEAST, ROUTERS, SLACK, KnowledgeRouter, Memory, Need, Router, bound
from ragjax.core import Kind, Prompt, Segment
from tests.support.fleets import answer, asked, fleet_of_two

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)


def segment(number: int, kind: Kind = Kind.CHUNK, size: int = 100, public: bool = False) -> Segment:
    return Segment(str(number), kind, np.full(size, number, np.int32), public=public)


def need(*chunks: int, exact: bool = False, tenant: str = "", size: int = 100, public: bool = False) -> Need:
    segments = tuple(segment(chunk, size=size, public=public) for chunk in chunks)
    return Need.of(Prompt(segments), tenant, exact)


def serve(router: Router, wanted: Need, loads: Mapping[str, int] = IDLE, found: Sequence[int] | None = None) -> str:
    """Route a request and have it answered; by default everything was found."""
    replica = router.order(wanted, loads)[0]
    router.sent(wanted, replica)(wanted.sizes if found is None else found)
    return replica


@pytest.mark.parametrize("name", ROUTERS)
def test_every_replica_is_in_the_order_once(name: str) -> None:
    router, wanted = ROUTERS[name](), need(1, 2)
    for loads in (IDLE, {"a": 3, "b": 0}, {"only": 9}, {}):
        assert sorted(router.order(wanted, loads)) == sorted(loads)
        for replica in loads:
            router.sent(wanted, replica)(wanted.sizes)


def test_pieces_of_a_chunk_strategy_are_alike_in_any_order() -> None:
    assert set(need(1, 2).pieces) == set(need(2, 1).pieces)
    assert set(need(1, 2, exact=True).pieces).isdisjoint(need(2, 1, exact=True).pieces)
    assert need(1, 2, exact=True).pieces[0] == need(1, 3, exact=True).pieces[0]


def test_the_question_is_no_piece() -> None:
    prompt = Prompt((segment(1), segment(2, Kind.QUERY)))
    made = Need.of(prompt, "", False)
    assert made.sizes == (100,) and len(made.tokens) == 200


def test_tenants_share_public_pieces_alone() -> None:
    assert need(1, tenant="x").pieces != need(1, tenant="y").pieces
    assert need(1, tenant="x", public=True).pieces == need(1, tenant="y", public=True).pieces


def test_paths_of_a_graph_are_pieces_under_an_exact_strategy() -> None:
    prompts = [Prompt((segment(i, Kind.NODE), segment(j, Kind.NODE))) for i, j in ((1, 2), (2, 1))]
    one, other = (Need.of(prompt, "", True) for prompt in prompts)
    assert set(one.pieces) == set(other.pieces) and not one.chained


def test_a_request_goes_where_its_passages_are_in_any_order() -> None:
    router = KnowledgeRouter()
    first = serve(router, need(1, 2, 3), found=(0, 0, 0))
    assert serve(router, need(3, 1, 2)) == first
    assert serve(router, need(9, 2, 3)) == first


def test_what_nobody_holds_is_spread() -> None:
    router = KnowledgeRouter()
    went = Counter(serve(router, need(10 * i, 10 * i + 1), found=(0, 0)) for i in range(200))
    assert set(went) == set(NAMES) and max(went.values()) < 2 * 200 / len(NAMES)


def test_a_chain_is_held_as_far_as_it_is_whole() -> None:
    memory = Memory()
    memory.send(need(1, 2, exact=True), "a")
    assert memory.held(need(1, 2, 3, exact=True)) == {"a": 200} and not memory.held(need(2, 1, exact=True))
    memory.send(need(5, 6), "b")
    assert memory.held(need(6, 7, 5)) == {"b": 200}


def test_what_is_never_kept_or_recomputed_does_not_shrink_the_reach() -> None:
    memory = Memory()
    both = need(1, 200)
    memory.send(both, "a")
    memory.learn(both, "a", (900, 100), (0, 100))
    assert memory.reach("a") == 900
    for _ in range(50):
        memory.learn(both, "a", (0, 100), (0, 100))  # the first is never kept, and is sent each time
        memory.learn(both, "a", (500, 100), (30, 100))  # most of the first was found, and computed again
    assert memory.reach("a") == 900


def test_the_reach_is_learnt_from_answers() -> None:
    memory, old = Memory(), need(1)
    memory.send(old, "a")
    for i in range(20):
        memory.send(need(100 + i), "a")
    assert memory.held(old) == {"a": 100}, "nothing is known of what it forgets"
    memory.send(need(119), "a")
    both = need(1, 119)
    ages = memory.send(both, "a")
    memory.learn(both, "a", ages, (0, 0))  # `full` finds nothing
    assert math.isinf(memory.reach("a"))
    memory.learn(both, "a", ages, (0, 100))  # it was gone after 2,100 tokens
    assert memory.reach("a") == 2100
    for i in range(25):
        memory.send(need(200 + i), "a")
    assert not memory.held(old)
    memory.learn(old, "a", memory.send(old, "a"), (100,))  # but it is there after 2,500
    assert memory.reach("a") == 2500


def test_what_lies_far_beyond_the_reach_is_not_kept() -> None:
    memory = Memory()
    memory.send(need(0), "a")
    memory.learn(need(0), "a", memory.send(need(0), "a"), (100,))
    both = need(0, 1)
    memory.learn(both, "a", (500, 0), (0, 100))
    assert memory.reach("a") == 500
    for i in range(300):
        memory.send(need(i), "a")
    assert memory.sizes() == {"a": 1 + FAR * 500 // 100}
    memory.forget(())
    assert not memory.sizes() and not memory._sent


def test_load_tempers_and_is_bounded() -> None:
    router = KnowledgeRouter()
    home = serve(router, need(1, 2, 3), found=(0, 0, 0))
    for i in range(200):  # a request computes about 100 tokens
        serve(router, need(10 + i), found=(0,))
    assert router.order(need(1, 2, 3), {**IDLE, home: 1})[0] == home
    assert router.order(need(1, 2, 3), {**dict.fromkeys(NAMES, 4), home: 9})[0] != home


def test_the_fullest_queue_is_at_most_twice_the_mean() -> None:
    """Everybody asks for the same passage, and nobody is answered."""
    router, loads = KnowledgeRouter(), dict(IDLE)
    for _ in range(400):
        replica = router.order(need(1), loads)[0]
        router.sent(need(1), replica)
        assert loads[replica] + 1 <= bound(loads, SLACK)
        loads[replica] += 1
        assert max(loads.values()) <= max(2, SLACK * sum(loads.values()) / len(loads))


def test_of_two_replicas_a_warm_one_does_not_get_everything() -> None:
    """Nothing is computed any more; of two replicas the bound stops neither."""
    router, loads = KnowledgeRouter(), {"a": 0, "b": 0}
    for _ in range(60):
        loads[serve(router, need(1, 2), loads)] += 1
    assert min(loads.values()) >= 20


def test_a_replica_that_is_gone_is_forgotten() -> None:
    router = KnowledgeRouter()
    home = serve(router, need(1), found=(0,))
    left = {name: 0 for name in NAMES if name != home}
    router.order(need(1), left)
    assert home not in router._memory.sizes()


def test_two_choices_takes_the_less_loaded_of_two() -> None:
    router = TwoChoices()
    went = Counter(router.order(need(1), {"a": 5, "b": 1, "c": 3, "d": 2})[0] for _ in range(300))
    assert not went["a"] and went["b"] > went["d"] > went["c"] > 0


def test_prefix_follows_the_beginning_until_queues_are_uneven() -> None:
    router = PrefixRouter()
    first = serve(router, need(1, 2, 3))
    assert serve(router, need(1, 2, 9)) == first
    assert serve(router, need(3, 2, 1)) != first, "the smallest tree gets what matches nowhere"
    uneven = {**IDLE, first: IMBALANCE + 1}
    assert Counter(router.order(need(1, 2, 3), uneven)[0] for _ in range(50))[first] == 0


def test_random_requests_lose_nothing() -> None:
    """Sent, answered in any order or never, replicas coming and going: orders stay whole, memory bounded."""
    source, router, open_ = random.Random(7), KnowledgeRouter(), []
    for step in range(3000):
        names = [f"r{i}" for i in range(source.randint(1, 5))]
        wanted = need(*source.sample(range(30), source.randint(1, 4)), exact=source.random() < 0.3, size=10)
        order = router.order(wanted, {name: source.randint(0, 9) for name in names})
        assert sorted(order) == sorted(names)
        open_.append((wanted, router.sent(wanted, order[0])))
        if step % 2:
            asked_, learn = open_.pop(source.randrange(len(open_)))
            learn([source.choice((0, size)) for size in asked_.sizes])
    assert all(size < 1000 for size in router._memory.sizes().values())


class Direct(KnowledgeRouter):
    """Asks every replica what it holds, piece by piece, and compares all of them."""

    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        self._memory.forget(loads.keys())
        most, each = bound(loads, SLACK), max(self._computed, LEAST * need.total)
        at_home = self._homes(need, loads.keys())

        def rank(name: str) -> tuple[bool, float, int, str]:
            missing = need.total - self._held(need, name)
            return loads[name] + 1 > most, missing + loads[name] * each, -at_home.get(name, 0), name

        return sorted(loads, key=rank)

    def _held(self, need: Need, name: str) -> int:
        found, one = 0, self._memory._replicas.get(name)
        for piece, size in zip(need.pieces, need.sizes, strict=True):
            at = self._memory._sent.get(piece, {}).get(name)
            if one is not None and at is not None and one.clock - at <= one.reach:
                found += size
            elif need.chained:
                break
        return found


def test_the_index_chooses_as_the_direct_computation() -> None:
    """Random requests, answers of a cache that forgets, loads, and replicas that come and go."""
    source, indexed, direct = random.Random(11), KnowledgeRouter(), Direct()
    chosen: Counter[str] = Counter()
    held = 0
    for _ in range(3000):
        names = [f"r{i}" for i in range(12) if i < 9 or source.random() < 0.99]
        loads = {name: source.choice((0, 0, 1, 1, 2, 3, 9)) for name in source.sample(names, len(names))}
        wanted = need(*source.sample(range(60), source.randint(1, 5)), exact=source.random() < 0.4, size=10)
        best = indexed.order(wanted, loads)[0]
        assert best == direct.order(wanted, loads)[0]
        held += bool(indexed._memory.held(wanted))
        chosen[best] += 1
        found = [source.choice((0, size, size)) for size in wanted.sizes]
        for router in (indexed, direct):
            router.sent(wanted, best)(found)
    assert len(chosen) == 12 and held > 1000


def test_a_fleet_sends_a_question_where_its_passages_are() -> None:
    with fleet_of_two(KnowledgeRouter()) as (fleet, transport, _):
        for _ in range(3):
            last = answer(fleet, asked(strategy="naive"))
        assert len(set(transport.sent)) == 1
        chunks = [segment for segment in last.segments if segment.score is not None]
        assert chunks and all(segment.reused == segment.tokens for segment in chunks)
