"""benchmarks.cluster: the simulated caches find what they were sent, and the command reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.simulation import Replica, Setting, needs, simulate, size_of, traced
from benchmarks.policies.source import Forest, Pattern, Request
from ragjax.cluster.router import ROUTERS

SMALL = Setting(Pattern(skew=1.0), 3, chunks=64, tokens=16, room=16, topic=8, requests=60)


def test_a_replica_finds_what_it_holds_and_forgets_the_oldest() -> None:
    first, second = list(needs(SMALL))[:2]
    replica = Replica(room=4)
    assert replica.look_up(first) == [0, 0, 0, 0]
    assert replica.look_up(first) == [16, 16, 16, 16]
    replica.look_up(second)
    assert len(replica.held) == 4 and set(replica.held) == set(second.pieces)


def test_a_request_gets_chunks_of_one_topic() -> None:
    for need in needs(SMALL):
        assert len({int.from_bytes(piece, "little") // 8 for piece in need.pieces}) == 1
        assert len(set(need.pieces)) == 4


def test_a_trace_is_held_as_far_as_its_chain_is_whole() -> None:
    forest = Forest()
    first = forest.child(-1, "first", 512)
    ends = [forest.child(first, name, 100) for name in ("a", "b")]
    one, other = traced(forest.workload("trace", [Request((first, end)) for end in ends]))
    assert one.chained and len(one.tokens) == 612
    replica = Replica(room=2)
    assert replica.look_up(one) == [0, 0]
    assert replica.look_up(other) == [512, 0], "what goes is the end of a chain"
    del replica.held[other.pieces[0]]
    assert replica.look_up(other) == [0, 0]


def test_a_router_is_measured_with_all_it_holds() -> None:
    router, pieces = ROUTERS["knowledge"](), set()
    empty = size_of(router, set())
    for need in needs(SMALL):
        router.sent(need, "a")
        pieces.update(need.pieces)
    assert size_of(router, set()) > empty + sum(map(sys.getsizeof, pieces))
    shared = [bytes(1000)]
    assert size_of([shared, shared], set()) < 2000


@pytest.mark.parametrize("name", ROUTERS)
def test_every_request_is_counted(name: str) -> None:
    outcome = simulate(SMALL, list(needs(SMALL)), ROUTERS[name]())
    assert outcome.asked == 90 * 64 and 0 < outcome.found < outcome.asked
    assert len(outcome.waits_s) == len(outcome.decide_us) == 90
    assert min(outcome.waits_s) > 0.99 * SMALL.base_s


@pytest.mark.slow
def test_the_command_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cluster.__main__.PATTERNS", {"zipf": Pattern(1.0), "temporal": Pattern(recent=0.5)})
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main(["--quick", "--replicas", "2,3", *files]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {row["router"] for row in rows} == set(ROUTERS) and len(rows) == 4 * 2 * len(ROUTERS)
