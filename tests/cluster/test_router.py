"""Routers: where requests go, by what replicas hold and how many they have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest

from ragjax.cluster import router as routing
from ragjax.cluster.router import HOLDERS, ROUTERS, SLACK, KnowledgeRouter, Need, Router, bound
from ragjax.core import Kind, Prompt, Segment
from tests.support.fleets import answer, asked, fleet_of_two

NAMES = ("a", "b", "c", "d")
IDLE = dict.fromkeys(NAMES, 0)


def segment(number: int, kind: Kind = Kind.CHUNK, size: int = 100, public: bool = False) -> Segment:
    return Segment(str(number), kind, np.full(size, number, np.int32), public=public)


def need(*chunks: int, exact: bool = False, tenant: str = "", size: int = 100, public: bool = False) -> Need:
    segments = tuple(segment(chunk, size=size, public=public) for chunk in chunks)
    return Need.of(Prompt(segments), tenant, exact)


def serve(router: Router, wanted: Need, loads: Mapping[str, int] = IDLE) -> str:
    replica = router.order(wanted, loads)[0]
    router.sent(wanted, replica)
    return replica


@pytest.mark.parametrize("name", ROUTERS)
def test_every_replica_is_in_the_order_once(name: str) -> None:
    router, wanted = ROUTERS[name](), need(1, 2)
    for loads in (IDLE, {"a": 3, "b": 0}, {"only": 9}, {}):
        assert sorted(router.order(wanted, loads)) == sorted(loads)
        for replica in loads:
            router.sent(wanted, replica)


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
    first = serve(router, need(1, 2, 3))
    assert serve(router, need(3, 1, 2)) == first
    assert serve(router, need(9, 2, 3)) == first


def test_what_nobody_holds_is_spread() -> None:
    router = KnowledgeRouter()
    went = Counter(serve(router, need(10 * i, 10 * i + 1)) for i in range(200))
    assert set(went) == set(NAMES) and max(went.values()) < 2 * 200 / len(NAMES)


def test_a_chain_is_held_as_far_as_it_is_whole() -> None:
    router = KnowledgeRouter()
    router.sent(need(1, 2, exact=True), "a")
    assert router._held(need(1, 2, 3, exact=True)) == {"a": 200} and not router._held(need(2, 1, exact=True))
    router.sent(need(5, 6), "b")
    assert router._held(need(6, 7, 5)) == {"b": 200}


def test_the_last_pieces_and_replicas_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_PIECES", 3)
    router = KnowledgeRouter()
    for i in range(HOLDERS + 2):
        router.sent(need(1), f"r{i}")
    assert set(router._held(need(1))) == {f"r{i}" for i in range(2, HOLDERS + 2)}
    router.sent(need(2, 3, 4), "a")
    assert not router._held(need(1)) and router._held(need(2, 3, 4)) == {"a": 300}


def test_load_tempers_and_is_bounded() -> None:
    router = KnowledgeRouter()
    home = serve(router, need(1, 2, 3))
    for i in range(200):  # a request computes about 100 tokens
        serve(router, need(10 + i))
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


def test_random_requests_lose_nothing() -> None:
    """Replicas come and go: orders stay whole."""
    source, router = random.Random(7), KnowledgeRouter()
    for _ in range(3000):
        names = [f"r{i}" for i in range(source.randint(1, 5))]
        wanted = need(*source.sample(range(30), source.randint(1, 4)), exact=source.random() < 0.3, size=10)
        order = router.order(wanted, {name: source.randint(0, 9) for name in names})
        assert sorted(order) == sorted(names)
        router.sent(wanted, order[0])


def test_a_fleet_sends_a_question_where_its_passages_are() -> None:
    with fleet_of_two(KnowledgeRouter()) as (fleet, transport, _):
        for _ in range(3):
            last = answer(fleet, asked(strategy="naive"))
        assert len(set(transport.sent)) == 1
        chunks = [segment for segment in last.segments if segment.score is not None]
        assert chunks and all(segment.reused == segment.tokens for segment in chunks)
