"""The command `figures`: its table, its flags, rows from figures known by hand, and stored reports."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.common import report
from tests.support import tiny
from tests.support.files import write_lines

WORDS = ("ferry", "bridge", "tower", "pier", "mill", "inn", "lock", "barn", "gate", "well")
RESULTS = Path(figures.__file__).parent / "results"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The sets that the figures read, four questions each over ten short passages."""
    for name in ("hotpotqa", "nq_open", "squad_xquad_en"):
        questions: list[dict[str, Any]] = []
        for i in range(4):
            passages = [
                {"id": f"{name}-{i}-{word}", "title": "", "text": f"The {word} {i} opens at {i + j}."}
                for j, word in enumerate(WORDS)
            ]
            asked = f"When does the {WORDS[i]} {i} open?"
            questions.append({"id": f"q{i}", "question": asked, "answers": [f"at {2 * i}"], "passages": passages})
        write_lines(tmp_path / "data" / "text" / name / "questions.jsonl", questions)
    return tmp_path / "data"


def test_the_list_names_all_figures_and_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*figures.FIGURES, *figures.ELSEWHERE, *figures.KEPT))
    for line in figures.ELSEWHERE.values():
        assert importlib.util.find_spec(f"benchmarks.{line.split()[0]}") is not None
    for name, figure in figures.FIGURES.items():
        paper, number = name.split("_")
        assert figure.paper == f"{ {'fusionrag': 'FusionRAG', 'cachecraft': 'Cache-Craft'}[paper] }, Figure {number}"


def test_a_file_that_is_no_report_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": [{"set": "x"}]}')
    for file in (Path(__file__), other):
        arguments = ["--figure", "fusionrag_13", "--rows", str(file), "--plot", str(tmp_path / "x.png")]
        assert figures.main(arguments) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2 and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["fusionrag_14a", "fusionrag_16", "fusionrag_17", "cachecraft_20"])
def test_stored_reports_are_drawn(name: str, tmp_path: Path) -> None:
    stored, drawn = RESULTS / f"2026-11-26-cpu-figure-{name}.json", tmp_path / "x.png"
    assert figures.main(["--figure", name, "--rows", str(stored), "--plot", str(drawn)]) == 0
    assert drawn.stat().st_size > 5000


def test_times_are_medians_and_ratios_those_of_a_run() -> None:
    full, half = figures.CASES[:2]
    found = {full: [100.0, 200.0, 300.0], half: [50.0, 50.0, 300.0]}
    samples = {case: [{"ttft_ms": t, "load_ms": 5.0} for t in times] for case, times in found.items()}
    _, row = figures.timed_rows(samples)
    assert (row["ttft_ms"], row["slowest_ms"], row["faster_than_full"], row["load_ms"]) == (50, 300, 2, 5)
    assert (row["strategy"], row["ratio"], row["state"]) == ("fusion", 0.0, "device")


def test_normalised_f1_is_drawn_where_full_reuse_loses_some() -> None:
    def row(name: str, strategy: str, high: float | None) -> dict[str, Any]:
        same = {"part": "sweep", "f1": 0.5, "em": 0.1, "kl": 0.2, "normalised_f1": 0.5}
        return {"set": name, "strategy": strategy, "ratio": 0.1, "f1_minus_full_hi": high, **same}

    rows = [row("a", "naive", -0.01), row("b", "naive", 0.01), row("c", "naive", None)]
    rows += [row(name, "blend", 0.0) | {"ratio": ratio} for name in "ab" for ratio in (0.1, 0.2)]
    assert len(figures.lost_f1(rows)) == 1 + 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fusionrag_16", "fusionrag_17"])
def test_a_figure_is_measured_and_drawn(name: str, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "weights_of", str)
    monkeypatch.setattr("ragjax.engine.Engine.load", lambda *a, **k: tiny.engine())
    monkeypatch.setattr(figures, "packaged_encoder", tiny.HashedEncoder)
    flags = ["--figure", name, "--data", str(data), "--quick", "--dtype", "float32"]
    assert figures.main([*flags, "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 5000 and (tmp_path / "r.json").stat().st_size > 1000
