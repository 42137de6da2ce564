"""Time to first token, on systems that take no time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import ttft
from benchmarks.common.envs import RivalError, Worker
from benchmarks.common.machine import Ceilings
from benchmarks.common.samples import Samples
from benchmarks.latency.prompt import BRIEF, LONG, OWN_CASES, WARM_PREFIX, Case, Workload, common_prefix, workload
from benchmarks.latency.system import System
from ragjax.core import Kind, Prompt, Segment
from tests.support.tiny import CONFIG


def prompt(*lengths: int, seed: int = 0) -> Prompt:
    draw = np.random.default_rng(seed)
    return Prompt(
        tuple(Segment(str(i), Kind.CHUNK, draw.integers(0, 90, n).astype(np.int32)) for i, n in enumerate(lengths))
    )


WORK = Workload(prompt(4, 6, seed=1), prompt(4, 6), prompt(6, 4), prompt(3))


class FakeLoad:
    """Others are quiet, but for the `loads` still to come."""

    loads: ClassVar[list[float]] = []

    def __init__(self, pid: int):
        """Begin."""

    def so_far(self) -> float:
        return self.loads.pop(0) if self.loads else 0.0


class NoWorker:
    """Stands for a running worker; its process is this one."""

    pid = 1

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class FakeSystem(System):
    """Takes `milliseconds` to the first token, and counts what it measures."""

    milliseconds: float = 100.0
    generated: list[tuple[Case, int]] = field(default_factory=list)
    stop_after: int | None = None
    length: int | None = None

    def open(self) -> Worker:
        return NoWorker()  # type: ignore[return-value]

    def start(self, work: Workload) -> dict[str, Any]:
        self.worker = self.open()
        return {"start_s": 1.0, "startup_peak_mb": 5.0, "resident_mb": 4.0}

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        if self.stop_after is not None and len(self.generated) >= self.stop_after:
            raise KeyboardInterrupt
        self.generated.append((case, new))
        rate = 10.0 if case.decode else None
        tokens = [0] * (self.length or new)
        return {"ttft_ms": self.milliseconds + len(self.generated), "decode_tokens_per_s": rate, "tokens": tokens}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft.time, "sleep", lambda _: None)
    monkeypatch.setattr(ttft, "reset_peak", lambda _: None)
    monkeypatch.setattr(ttft, "OtherLoad", FakeLoad)
    monkeypatch.setattr(FakeLoad, "loads", [])


def everyone() -> list[FakeSystem]:
    return [
        FakeSystem("ragjax", OWN_CASES, milliseconds=100.0),
        FakeSystem("transformers-bf16", (LONG, BRIEF), milliseconds=300.0),
    ]


def test_rounds_are_interleaved_and_rows_are_medians(tmp_path: Path) -> None:
    systems, samples = everyone(), Samples("ttft", {})
    ttft.measure(systems, WORK, samples, ttft.Effort(runs=3))
    ours, theirs = systems
    assert [case for case, _ in ours.generated] == [*OWN_CASES] * 3
    assert [new for _, new in theirs.generated] == [65, 65] * 3
    rows = ttft.rows_of(systems, WORK, samples, runs=3)
    keys = {"system", "strategy", "state", "context_tokens", "ttft_ms", "decode_tokens_per_s", "peak_mb"}
    assert all(keys <= set(row) for row in rows)
    assert [row["strategy"] for row in rows if row["system"] == "ragjax"] == [c.strategy for c in OWN_CASES]
    assert rows[0]["context_tokens"] == len(WORK.prompt)
    assert rows[1]["context_tokens"] == len(WORK.short)
    assert rows[0]["ttft_ms"] == 100.0 + 1 + len(OWN_CASES)  # the second of three runs
    assert rows[0]["ttft_ratio_transformers-bf16"] == pytest.approx(303.0 / 109.0)
    assert rows[0]["decode_ratio_transformers-bf16"] == 1.0
    assert "ttft_ratio_transformers-bf16" not in rows[-1]


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, again = everyone(), everyone()
    first[0].stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        ttft.measure(first, WORK, Samples("ttft", {}), ttft.Effort(runs=2))
    samples = Samples("ttft", {})
    ttft.measure(again, WORK, samples, ttft.Effort(runs=2))
    assert len(again[0].generated) == 2 * len(OWN_CASES) - 3
    assert all(row["runs"] == 2 for row in ttft.rows_of(again, WORK, samples, runs=2))


def test_a_disturbed_sample_is_tried_again() -> None:
    def tries(loads: list[float]) -> tuple[int, float]:
        FakeLoad.loads = loads
        system = FakeSystem("x", (WARM_PREFIX,), worker=NoWorker())  # type: ignore[arg-type]
        found = ttft.quietest(system, WARM_PREFIX, WORK, ttft.Effort())
        return len(system.generated), found["other_load"]

    assert tries([0.1]) == (1, 0.1)
    assert tries([0.9, 0.2]) == (2, 0.2)
    assert tries([0.9, 0.5, 0.7]) == (3, 0.5)


def test_an_answer_too_short_to_time_is_an_error() -> None:
    system = FakeSystem("short", (LONG,), worker=NoWorker(), length=3)  # type: ignore[arg-type]
    with pytest.raises(RivalError, match="short ended after 3 tokens"):
        ttft.sample(system, LONG, WORK, 65)


def test_common_prefix_counts_equal_tokens() -> None:
    one = prompt(4, 6)
    assert common_prefix(one, one) == 10
    assert common_prefix(one, Prompt(one.segments[:1])) == 4
    other = one.tokens.copy()
    other[7] += 1
    assert common_prefix(one, Prompt((Segment("x", Kind.CHUNK, other),))) == 7


def test_floors_of_a_small_model() -> None:
    layer = 48 * (4 + 2 + 2) * 16 + 64 * 48 + 3 * 48 * 64
    weights = 3 * layer + 260 * 48
    operations = 2 * 3 * layer * 100 + 2 * 260 * 48 + 2 * 100**2 * 4 * 16 * 3
    least_ms, rate = ttft.floors(CONFIG, 100, Ceilings(10.0, 200.0, 100.0))
    assert least_ms == pytest.approx(operations / 200e9 * 1e3)
    assert rate == pytest.approx(10e9 / (2 * weights))


def test_workload_is_the_same_text_in_every_prompt(smollm_path: Path) -> None:
    from ragjax.models.tokenizer import Tokenizer

    work = workload(Tokenizer.load(smollm_path))
    system = len(work.prompt.segments[0])
    assert [len(s) for s in work.prompt.segments] == [system, *[200] * 10, 30]
    assert len(work.short) == 512
    assert common_prefix(work.prompt, work.before) == system + 2000
    assert system <= common_prefix(work.shuffled, work.before) < system + 200
    assert sorted(s.id for s in work.shuffled.segments) == sorted(s.id for s in work.prompt.segments)
    assert work.prompt.segments[-1].kind is Kind.QUERY


def test_main_prints_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm_path: Path
) -> None:
    monkeypatch.setattr(ttft, "systems", lambda scratch, quick: everyone())
    assert ttft.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["benchmark"] == "ttft"
    assert {row["system"] for row in document["rows"]} == {"ragjax", "transformers-bf16"}
    assert {row["runs"] for row in document["rows"]} == {ttft.QUICK.runs}
    assert list((tmp_path / "store").iterdir()) == []
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("decode_tokens_per_s") < words.index("start and memory")
