"""The benchmarks' own machinery, on fakes: flags, report, samples that outlive a stop, workers, rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks import envs, parity, report, ttft
from ragjax.core import Kind, Prompt, Segment
from tests.support.tiny import CONFIG

CEILINGS = report.Ceilings(10.0, 100.0, 200.0)
HEAD = report.Header("ttft", "python -m benchmarks.ttft", {"cpu": "a"}, {"python": "3"})


def prompt(*lengths: int, seed: int = 0) -> Prompt:
    draw = np.random.default_rng(seed)
    return Prompt(
        tuple(Segment(str(i), Kind.CHUNK, draw.integers(0, 90, n).astype(np.int32)) for i, n in enumerate(lengths))
    )


WORK = ttft.Workload(prompt(4, 6, seed=1), prompt(4, 6), prompt(6, 4), prompt(3))


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
class FakeSystem(ttft.System):
    """Takes `milliseconds` to the first token, and counts what it measures."""

    milliseconds: float = 100.0
    generated: list[tuple[ttft.Case, int]] = field(default_factory=list)
    stop_after: int | None = None
    length: int | None = None

    def open(self) -> envs.Worker:
        return NoWorker()  # type: ignore[return-value]

    def start(self, work: ttft.Workload) -> dict[str, Any]:
        self.worker = self.open()
        return {"start_s": 1.0, "startup_peak_mb": 5.0, "resident_mb": 4.0}

    def generate(self, case: ttft.Case, work: ttft.Workload, new: int) -> Mapping[str, Any]:
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
    monkeypatch.setattr(report, "ceilings", lambda: CEILINGS)


# ------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("module", [parity, ttft])
@pytest.mark.parametrize("flag", ["--qui", "--no-such-flag", "extra"])
def test_unknown_flags_are_errors(module: Any, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main([flag])
    assert stop.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--make", "x", "--check"], ["--make", "x", "--json", "y"]])
def test_flags_that_contradict_are_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parity.main(flags)
    assert stop.value.code == 2
    assert "--check" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ report


def test_document_has_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"system": "a", "ttft_ms": 1234.5}, {"system": "bcd", "ttft_ms": None}]
    out = tmp_path / "new" / "report.json"
    report.finish(HEAD, rows, ("system", "ttft_ms"), out)
    document = json.loads(out.read_text())
    assert list(document) == ["benchmark", "command", "machine", "versions", "rows"]
    assert document["rows"] == rows
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].split() == ["system", "ttft_ms"]
    assert [line.split() for line in lines[2:]] == [["a", "1234"], ["bcd", "-"]]


def test_a_report_that_cannot_be_written_is_an_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    flags = report.parser("ttft", "")
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        with pytest.raises(SystemExit):
            flags.parse_args(["--json", str(path)])
        assert f"--json: {path} cannot be written" in capsys.readouterr().err
    assert flags.parse_args(["--json", str(tmp_path / "new" / "report.json")]).json.name == "report.json"


def test_samples_are_kept_until_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "STORE", tmp_path)

    def measure(samples: report.Samples) -> list[report.Row]:
        samples.put("a", {"ms": 1.0})
        return [{"ms": float("nan")}]

    def run(measure: Callable[[report.Samples], list[report.Row]]) -> object:
        return report.sampled("b", ("ms",), tmp_path / "report.json", lambda head: {"cpu": 1}, measure)

    with pytest.raises(ValueError, match="not JSON compliant"):
        run(measure)
    assert run(lambda samples: [samples.get("a") or {}]) == [{"ms": 1.0}]
    assert run(lambda samples: [samples.get("a") or {}]) == [{}]


def test_document_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.finish(HEAD, [{"x": float("nan")}], ("x",), tmp_path / "report.json")


def test_header_prints_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    head = report.header("ttft", {"rival": "1.0"})
    assert "10.0 GB/s" in capsys.readouterr().out
    assert head.machine["ceilings"]["gemm_bf16_gflops"] == 200.0
    assert head.machine["cores"] >= 1
    assert head.versions["rival"] == "1.0"
    assert "jax" in head.versions


def test_median_passes_over_what_is_missing() -> None:
    assert report.median([3.0, None, 1.0, 8.0]) == 3.0
    assert report.median([None]) is None


def test_samples_outlive_a_stop_but_not_other_settings(tmp_path: Path) -> None:
    report.Samples("b", {"n": 1}, tmp_path).put("a", {"ms": 2.0})
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text() + '\n{"key": "half a li')  # killed while writing
    again = report.Samples("b", {"n": 1}, tmp_path)
    assert again.get("a") == {"ms": 2.0}
    assert again.get("half a li") is None
    assert report.Samples("b", {"n": 2}, tmp_path).get("a") is None
    again.put("c", {"ms": 3.0})
    assert report.Samples("b", {"n": 1}, tmp_path).get("c") == {"ms": 3.0}
    again.done()
    assert report.Samples("b", {"n": 1}, tmp_path).get("a") is None


# ----------------------------------------------------------------------------------------- workers

ECHO = f"""
import sys
sys.path.insert(0, {str(envs.WORKERS)!r})
from wire import serve

def double(value):
    print("words that are no answer")
    return {{"value": 2 * value}}

def leave():
    print("last words", file=sys.stderr)
    sys.exit(3)

serve({{"double": double, "leave": leave}})
"""


def test_worker_answers_and_reports_errors() -> None:
    with envs.Worker([sys.executable, "-c", ECHO]) as worker:
        assert worker.ask({"op": "double", "value": 21}) == {"value": 42}
        with pytest.raises(envs.RivalError, match="KeyError"):
            worker.ask({"op": "no such operation"})
        assert worker.ask({"op": "double", "value": "ab"}) == {"value": "abab"}
        with pytest.raises(envs.RivalError, match=r"exit code 3(.|\n)*last words"):
            worker.ask({"op": "leave"})
        with pytest.raises(envs.RivalError, match="exit code 3"):
            worker.ask({"op": "double", "value": 1})


def test_unknown_environment_is_an_error() -> None:
    with pytest.raises(envs.RivalError, match="llamacpp, llmlingua, transformers"):
        envs.python("no-such-rival")


def test_environment_is_remade_only_when_its_pins_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    pins = tmp_path / "envs" / "rival.txt"
    pins.write_text("one==1\n")
    installed: list[str] = []

    def make(home: Path, with_pip: bool) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").touch()

    monkeypatch.setattr(envs, "HERE", tmp_path)
    monkeypatch.setattr(envs, "HOMES", tmp_path / ".envs")
    monkeypatch.setattr(envs.venv, "create", make)
    monkeypatch.setattr(envs, "_install", lambda interpreter, pins, *_: installed.append(pins.read_text()))
    assert envs.python("rival") == envs.python("rival") == tmp_path / ".envs" / "rival" / "bin" / "python"
    assert installed == ["one==1\n"]
    pins.write_text("one==2\n")
    envs.python("rival")
    assert installed == ["one==1\n", "one==2\n"]


def test_failed_installation_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "HOMES", tmp_path)

    def make(home: Path, with_pip: bool) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").write_text("#!/bin/sh\necho no wheel for this machine\nexit 1\n")
        (home / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(envs.venv, "create", make)
    with pytest.raises(envs.RivalError, match="no wheel for this machine"):
        envs.python("transformers")
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------- ttft


def everyone() -> list[FakeSystem]:
    return [
        FakeSystem("ragjax", ttft.OWN_CASES, milliseconds=100.0),
        FakeSystem("transformers-bf16", (ttft.LONG, ttft.BRIEF), milliseconds=300.0),
    ]


def test_rounds_are_interleaved_and_rows_are_medians(tmp_path: Path) -> None:
    systems, samples = everyone(), report.Samples("ttft", {}, tmp_path)
    ttft.measure(systems, WORK, samples, ttft.Effort(runs=3))
    ours, theirs = systems
    assert [case for case, _ in ours.generated] == [*ttft.OWN_CASES] * 3
    assert [new for _, new in theirs.generated] == [65, 65] * 3
    rows = ttft.rows_of(systems, WORK, samples, runs=3)
    keys = {"system", "strategy", "state", "context_tokens", "ttft_ms", "decode_tokens_per_s", "peak_mb"}
    assert all(keys <= set(row) for row in rows)
    assert [row["strategy"] for row in rows if row["system"] == "ragjax"] == [c.strategy for c in ttft.OWN_CASES]
    assert rows[0]["context_tokens"] == len(WORK.prompt)
    assert rows[1]["context_tokens"] == len(WORK.short)
    assert rows[0]["ttft_ms"] == 100.0 + 1 + len(ttft.OWN_CASES)  # the second of three runs
    assert rows[0]["ttft_ratio_transformers-bf16"] == pytest.approx(303.0 / 109.0)
    assert rows[0]["decode_ratio_transformers-bf16"] == 1.0
    assert "ttft_ratio_transformers-bf16" not in rows[-1]


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, again = everyone(), everyone()
    first[0].stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        ttft.measure(first, WORK, report.Samples("ttft", {}, tmp_path), ttft.Effort(runs=2))
    samples = report.Samples("ttft", {}, tmp_path)
    ttft.measure(again, WORK, samples, ttft.Effort(runs=2))
    assert len(again[0].generated) == 2 * len(ttft.OWN_CASES) - 3
    assert all(row["runs"] == 2 for row in ttft.rows_of(again, WORK, samples, runs=2))


def test_a_disturbed_sample_is_tried_again() -> None:
    def tries(loads: list[float]) -> tuple[int, float]:
        FakeLoad.loads = loads
        system = FakeSystem("x", (ttft.WARM_PREFIX,), worker=NoWorker())  # type: ignore[arg-type]
        found = ttft.quietest(system, ttft.WARM_PREFIX, WORK, ttft.Effort())
        return len(system.generated), found["other_load"]

    assert tries([0.1]) == (1, 0.1)
    assert tries([0.9, 0.2]) == (2, 0.2)
    assert tries([0.9, 0.5, 0.7]) == (3, 0.5)


def test_an_answer_too_short_to_time_is_an_error() -> None:
    system = FakeSystem("short", (ttft.LONG,), worker=NoWorker(), length=3)  # type: ignore[arg-type]
    with pytest.raises(envs.RivalError, match="short ended after 3 tokens"):
        ttft.sample(system, ttft.LONG, WORK, 65)


def test_common_prefix_counts_equal_tokens() -> None:
    one = prompt(4, 6)
    assert ttft.common_prefix(one, one) == 10
    assert ttft.common_prefix(one, Prompt(one.segments[:1])) == 4
    other = one.tokens.copy()
    other[7] += 1
    assert ttft.common_prefix(one, Prompt((Segment("x", Kind.CHUNK, other),))) == 7


def test_floors_of_a_small_model() -> None:
    layer = 48 * (4 + 2 + 2) * 16 + 64 * 48 + 3 * 48 * 64
    weights = 3 * layer + 260 * 48
    operations = 2 * 3 * layer * 100 + 2 * 260 * 48 + 2 * 100**2 * 4 * 16 * 3
    least_ms, rate = ttft.floors(CONFIG, 100, {"gemm_bf16_gflops": 200.0, "copy_gb_s": 10.0})
    assert least_ms == pytest.approx(operations / 200e9 * 1e3)
    assert rate == pytest.approx(10e9 / (2 * weights))


def test_workload_is_the_same_text_in_every_prompt(smollm_path: Path) -> None:
    from ragjax.models.tokenizer import Tokenizer

    work = ttft.workload(Tokenizer.load(smollm_path))
    system = len(work.prompt.segments[0])
    assert [len(s) for s in work.prompt.segments] == [system, *[200] * 10, 30]
    assert len(work.short) == 512
    assert ttft.common_prefix(work.prompt, work.before) == system + 2000
    assert system <= ttft.common_prefix(work.shuffled, work.before) < system + 200
    assert sorted(s.id for s in work.shuffled.segments) == sorted(s.id for s in work.prompt.segments)
    assert work.prompt.segments[-1].kind is Kind.QUERY


def test_main_prints_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm_path: Path
) -> None:
    monkeypatch.setattr(ttft, "systems", lambda scratch, quick: everyone())
    monkeypatch.setattr(report, "STORE", tmp_path / "store")
    assert ttft.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["benchmark"] == "ttft"
    assert {row["system"] for row in document["rows"]} == {"ragjax", "transformers-bf16"}
    assert {row["runs"] for row in document["rows"]} == {ttft.QUICK_RUNS}
    assert list((tmp_path / "store").iterdir()) == []
    words = capsys.readouterr().out
    assert words.index("ceiling") < words.index("decode_tokens_per_s") < words.index("start and memory")
