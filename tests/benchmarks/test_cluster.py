"""benchmarks.cluster: the simulated caches find what they were sent, and the command reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cluster.__main__ import main
from benchmarks.cluster.simulation import Replica, Setting, needs, simulate
from benchmarks.policies.workload import Pattern
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


@pytest.mark.parametrize("name", ROUTERS)
def test_every_request_is_counted(name: str) -> None:
    outcome = simulate(SMALL, list(needs(SMALL)), ROUTERS[name]())
    assert outcome.asked == 90 * 64 and 0 < outcome.found < outcome.asked
    assert len(outcome.waits_s) == len(outcome.decide_us) == 90
    assert min(outcome.waits_s) > 0.99 * SMALL.base_s


def test_the_command_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cluster.__main__.PATTERNS", {"zipf": Pattern(1.0), "temporal": Pattern(recent=0.5)})
    assert main(["--quick", "--replicas", "2", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {row["router"] for row in rows} == set(ROUTERS) and len(rows) == 4 * (len(ROUTERS) + 2)
