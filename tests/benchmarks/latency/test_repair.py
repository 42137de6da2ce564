"""`repair`: what is warm, and what it costs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import repair
from benchmarks.latency.prompt import Workload
from ragjax.core import Prompt
from tests.support import tiny

pytestmark = pytest.mark.slow


def small_work() -> Workload:
    one, other = tiny.prompt(1, chunks=(40,) * 4), tiny.prompt(2, chunks=(40,) * 4)
    rest = one.segments[:-1]
    return Workload(one, Prompt((*rest, other.segments[-1])), one, one)


def test_repair_measures_warm_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "workload", lambda tokenizer: small_work())
    names = ("full", "naive", "random", "fusion")
    chosen = repair.BENCHMARK.parse(["--runs", "2", "--ratio", "0.25", "--strategies", "random,fusion"])
    with tiny.engine() as engine:
        made = {r["strategy"]: r for r in repair.run(engine, chosen)}
    shares = {name: made[name]["recomputed_share"] for name in names}
    assert shares == {"full": 1.0, "naive": 0.0, "random": 0.25, "fusion": 0.25}
    passes = {name: made[name]["passes"] for name in names}
    assert passes == {"full": 1, "naive": 1, "random": 1, "fusion": 2}
    assert made["full"]["selection_share"] == made["naive"]["selection_share"] == 0.0
    assert 0 < made["fusion"]["selection_share"] < 1 and made["fusion"]["chunks_per_s"] > 0
    assert made["full"]["faster_than_full"] == 1.0 and all(made[name]["runs"] == 2 for name in names)


def test_break_even_is_the_cost_of_a_chunk_over_what_its_reuse_saves(capsys: pytest.CaptureFixture[str]) -> None:
    base = {"selection_ms": 10.0, "passes": 2.0, "recomputed_share": 0.15, "context_tokens": 9.0}
    found = {"full": [{**base, "ttft_ms": t} for t in (2000.0, 2100.0)], "fusion": [{**base, "ttft_ms": 50.0}] * 2}
    made = repair.rows(found, 0.15, frozenset({"fusion"}), 0.3, 0.4)
    assert made[1]["break_even"] == pytest.approx(0.4 / (2.0 / repair.CHUNKS))
    assert made[1]["faster_than_full"] == pytest.approx(41) and made[1]["selection_share"] == pytest.approx(0.2)
    assert (made[0]["ratio"], made[1]["ratio"]) == (None, 0.15)
    repair.show(made, Namespace())
    assert "after 2.0 reuses" in capsys.readouterr().out
