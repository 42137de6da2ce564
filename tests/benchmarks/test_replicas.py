"""benchmarks.cluster: what is asked, what is read of metrics, and the rows, over a server of fakes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import benchmarks.baseline  # noqa: F401 (registers its names)
from benchmarks.cluster import fleet, trial
from benchmarks.cluster.__main__ import main
from benchmarks.cluster.fleet import FleetServer, figures
from benchmarks.cluster.trial import Bench, Case, Plan, cases, compared, point_of, row_of
from benchmarks.common.report import MODEL
from benchmarks.load.client import Load, Record
from ragjax.cluster.router import ROUTERS
from ragjax.core import Document
from tests.support.fakes import FakeEngine
from tests.support.serving import serving

EXPOSITION = """
# HELP ragjax_requests_total Requests answered, by strategy.
# TYPE ragjax_requests_total counter
ragjax_requests_total{replica="0",strategy="naive"} 3.0
ragjax_requests_total{replica="0",strategy="prefix"} 2.0
ragjax_requests_total{replica="1",strategy="naive"} 4.0
# TYPE ragjax_http_requests_total counter
ragjax_http_requests_total{route="/health",status="200"} 9.0
"""


def test_a_metric_is_read_by_replica() -> None:
    assert figures(EXPOSITION, "ragjax_requests_total") == {"0": 5.0, "1": 4.0}
    assert figures(EXPOSITION, "ragjax_http_requests_total") == {}


def test_a_document_is_cut_evenly_and_whole() -> None:
    text = " ".join(map(str, range(25)))
    found = fleet.pieces(Document("d", text, "Title"), words=10)
    assert [len(piece.text.split()) for piece in found] == [8, 9, 8]
    assert " ".join(piece.text for piece in found) == text
    assert {(piece.id, piece.title) for piece in found} == {(f"d-{n}", "Title") for n in range(3)}


def test_requests_are_the_same_for_every_router_and_new_in_every_workload() -> None:
    passages = [Document(f"d{n}", f"text {n}") for n in range(20)]
    one, two, near = (fleet.requests(name, passages, ["Why?", "When?"], 30) for name in fleet.WORKLOADS)
    assert {tuple({int(d[1:]) // 8 for d in ask.documents or ()}) for ask in near} == {(0,), (1,)}, "of one topic each"
    assert one == fleet.requests("zipf", passages, ["Why?", "When?"], 30)
    assert one[:9] == fleet.requests("zipf", passages, ["Why?", "When?"], 9), "a longer run begins as a shorter one"
    assert all(len(set(ask.documents or ())) == fleet.TOGETHER for ask in (*one, *two, *near))
    first, again = (fleet.exact(one[:1], 16)[n] for n in range(2))
    assert first.documents == again.documents == (one[0].documents or ())[:2] and first.id != again.id


def test_a_row_counts_what_was_answered() -> None:
    done = [Record(f"{n}", 0.0, times=[0.1 * (n + 1)], done=1.0, prompt_tokens=100, found_tokens=50) for n in range(3)]
    row = row_of(Load([*done, Record("x", 0.0, done=2.0, error="503")]), [2.0, 1.0, 0.0])
    assert (row["requests"], row["errors"], row["found"], row["fullest"]) == (4, 1, 0.5, 2.0)
    assert row["ttft_p50_ms"] == pytest.approx(200) and row["requests_per_s"] == 1.5


def test_a_point_of_a_curve_is_of_what_came_since_the_last() -> None:
    before = [{"0": 50.0, "1": 5.0}, {"0": 1000.0, "1": 100.0}, {"0": 900.0, "1": 0.0}]
    after = [{"0": 55.0, "1": 10.0}, {"0": 1100.0, "1": 200.0}, {"0": 980.0, "1": 20.0}]
    assert point_of("1", before, after) == {"requests": 10, "found": 0.2, "neighbour": 0.8, "ratio": 0.25}
    assert point_of("1", after, after)["ratio"] is None


def test_answers_are_compared_with_one_replicas() -> None:
    assert compared({"a": "x", "b": "y"}, {"a": "x", "b": "z", "c": ""}) == {"exact": 2, "equal": 0.5}


def test_one_replica_comes_first_and_two_have_every_router() -> None:
    names = list(fleet.WORKLOADS)
    planned = list(cases([2, 4], names, quick=False))
    assert planned[0].workloads == ("zipf",) and all(case.workloads == tuple(names) for case in planned[1:])
    assert planned[0].replicas == 1 and len({str(case) for case in planned}) == len(planned)
    assert {case.router for case in planned if case.replicas == 2 and not case.shared} == set(ROUTERS)
    assert {case.shared for case in planned if case.newcomer} == {True, False}
    one, *rest = cases([2, 4], names, quick=False, tier="with")
    assert not one.shared and rest == [case for case in planned if case.shared]


@dataclass
class Pair(FakeEngine):
    """Requests go to rank 0 and 1 in turn. gone: of rank 1, before it was replaced."""

    gone: int = 0

    def figures(self) -> dict[str, dict[str, Any]]:
        found = {}
        for rank in (0, 1):
            count = len(self.requests[rank::2]) - rank * self.gone
            by_strategy = {"naive": count} if count else {}
            found[f"{rank}"] = {"requests_total": by_strategy, "prompt_tokens_total": 10 * count}
            found[f"{rank}"]["reused_tokens_total"] = 4 * count if rank else 8 * count
            found[f"{rank}"] |= {"routed_total": count, "routing_seconds_total": count * 2e-6}
        return found

    def kill(self) -> None:
        self.gone = len(self.requests[1::2])


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    engine = Pair(model_name=MODEL, context_length=10**6)
    with serving(engine) as served:

        class Local(FleetServer):
            pid = 0

            async def open(self) -> None:
                self._url = served.url

            async def close(self) -> None:
                pass

        monkeypatch.setattr(trial, "FleetServer", Local)
        monkeypatch.setattr(fleet, "_replicas", lambda pid: [engine])
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 200.0])
def test_a_case_is_measured_from_its_loads_to_the_new_replicas_curve(pair: Pair, rate: float | None) -> None:
    plan = Plan(requests=6, warm=4, clients=2, rate=rate, points=2, step=3, device_cache_gb=0.1)
    passages = [Document(f"d{n}", f"text {n}") for n in range(20)]
    made = Bench(plan, passages, ["Why is this so?"]).measure(Case(2, "round-robin", False, ("zipf", "temporal")))
    assert [row["workload"] for row in made["rows"]] == ["zipf", "temporal"]
    for row in made["rows"]:
        assert (row["replicas"], row["router"], row["shared"]) == (2, "round-robin", False)
        assert (row["requests"], row["errors"], row["fullest"], row["found"]) == (6, 0, 1.0, 7 / 4)
        assert row["route_us"] == pytest.approx(2)
        assert row["ttft_p50_ms"] > 0 and row["requests_per_s"] > 0
    assert set(made["texts"].values()) == {"The lighthouse is red."} and len(made["texts"]) == 8
    assert [(point["requests"], point["found"], point["neighbour"]) for point in made["curve"]] == [
        (3, 0.4, 0.8),
        (6, 0.4, 0.8),
    ]
    asked = [(r.rag.strategy, r.rag.documents) for r in pair.requests if r.rag]
    assert len(asked) == 2 * 10 + 8 + 2 * 6 and all(documents for _, documents in asked)
    assert [strategy for strategy, _ in asked] == [None] * 20 + ["prefix"] * 8 + [None] * 12


def test_without_ray_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([]) == 1
    assert "pip install '.[ray]' in ragjax's folder" in capsys.readouterr().err
