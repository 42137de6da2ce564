"""Flags, the report, and samples that outlive a stop."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import report, samples
from benchmarks.common.envs import RivalError
from benchmarks.common.machine import median
from benchmarks.common.samples import Samples
from ragjax.core import ConfigError, RequestError

HEAD = report.Header("ttft", "python -m benchmarks.ttft", {"cpu": "a"}, {"python": "3"})


def finished(
    rows: Sequence[report.Row], file: Path | None, measure: Callable[[Samples], object] = lambda _: None
) -> int:
    """The exit code of a command that measures these rows."""

    def made(_: argparse.Namespace, session: report.Session) -> Sequence[report.Row]:
        measure(session.samples({"n": 1}))
        return rows

    command = report.Benchmark("b", "", ("system", "ttft_ms"), made)
    return command.main([] if file is None else ["--json", str(file)])


def test_document_has_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"system": "a", "ttft_ms": 1234.5}, {"system": "bcd", "ttft_ms": None}]
    out = tmp_path / "new" / "report.json"
    assert finished(rows, out) == 0
    document = json.loads(out.read_text())
    assert list(document) == ["benchmark", "command", "machine", "versions", "rows"]
    assert document["rows"] == rows
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-4].split() == ["system", "ttft_ms"]
    assert [line.split() for line in lines[-2:]] == [["a", "1234"], ["bcd", "-"]]


def test_a_report_that_cannot_be_written_is_an_error_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    flags = report.Parser("ttft", "")
    for path in (tmp_path, tmp_path / "file" / "report.json"):
        with pytest.raises(SystemExit):
            flags.parse_args(["--json", str(path)])
        assert f"--json: {path} cannot be written" in capsys.readouterr().err
    assert flags.parse_args(["--json", str(tmp_path / "new" / "report.json")]).json.name == "report.json"


def test_samples_are_kept_until_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def measure(samples: Samples) -> None:
        seen.append(samples.get("a"))
        samples.put("a", {"ms": 1.0})

    with pytest.raises(ValueError, match="not JSON compliant"):
        finished([{"system": float("nan")}], tmp_path / "report.json", measure)
    for _ in range(2):
        assert finished([], tmp_path / "report.json", measure) == 0
    assert seen == [None, {"ms": 1.0}, None]
    assert "continuing a stopped run: 1 samples" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConfigError, RequestError, RivalError])
def test_errors_of_ours_and_of_rivals_are_one_line(error: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    def fails(samples: Samples) -> None:
        raise error("no such thing")

    assert finished([], None, fails) == 1
    assert capsys.readouterr().err == "error: no such thing\n"


def test_document_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.write(tmp_path / "report.json", HEAD, [{"x": float("nan")}])
    assert list(tmp_path.iterdir()) == []


def test_header_prints_the_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    session = report.Session("ttft")
    session.add_versions({"rival": "1.0"})
    assert "10.0 GB/s" in capsys.readouterr().out
    assert session.head.machine["ceilings"]["gemm_bf16_gflops"] == 200.0 == session.head.ceilings.gemm_bf16_gflops
    assert session.head.machine["cores"] >= 1
    assert session.head.versions["rival"] == "1.0"
    assert "jax" in session.head.versions


def test_median_passes_over_what_is_missing() -> None:
    assert median([3.0, None, 1.0, 8.0]) == 3.0
    assert median([None]) is None


def test_samples_outlive_a_stop_but_not_other_settings(tmp_path: Path) -> None:
    Samples("b", {"n": 1}).put("a", {"ms": 2.0})
    (file,) = samples.STORE.iterdir()
    file.write_text(file.read_text() + '\n{"key": "half a li')  # killed while writing
    again = Samples("b", {"n": 1})
    assert again.get("a") == {"ms": 2.0}
    assert again.get("half a li") is None
    assert Samples("b", {"n": 2}).get("a") is None
    again.put("c", {"ms": 3.0})
    assert Samples("b", {"n": 1}).get("c") == {"ms": 3.0}
    again.done()
    assert Samples("b", {"n": 1}).get("a") is None


def test_samples_do_not_outlive_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    Samples("b", {}).put("a", {"ms": 2.0})
    monkeypatch.setattr(samples, "code_digest", lambda: "other")
    assert Samples("b", {}).get("a") is None


def test_the_digest_covers_the_engine_and_the_benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("ragjax/a.py", "train/a.py", "benchmarks/a.py", "tests/support/oracle.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    monkeypatch.setattr(samples, "ROOT", tmp_path)
    digests = [samples.code_digest.__wrapped__()]
    for file in files:
        file.write_text("2")
        digests.append(samples.code_digest.__wrapped__())
    assert len(set(digests)) == 5
    rival = tmp_path / "benchmarks" / ".envs" / "rival.py"
    rival.parent.mkdir()
    rival.write_text("")
    assert samples.code_digest.__wrapped__() == digests[-1]


def test_a_list_of_names_is_not_empty() -> None:
    assert report.listed("a,b,") == ["a", "b"]
    with pytest.raises(argparse.ArgumentTypeError, match="one at least"):
        report.listed("")
