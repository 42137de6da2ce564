"""`python -m benchmarks.quality` on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality import __main__ as quality
from ragjax.engine import Engine
from tests.support import tiny

pytestmark = pytest.mark.slow


def test_the_command_measures_and_reports(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Engine, "load", lambda *a, **k: tiny.engine())
    monkeypatch.setattr(quality, "weights_of", str)
    monkeypatch.setattr(quality, "packaged_encoder", tiny.HashedEncoder)
    out = tmp_path / "r.json"
    command = ["--data", str(data), "--sets", "boats,talks", "--limit", "2", "--sweep", "1", "--max-tokens", "12"]
    command += ["--strategies", "naive,random", "--ratios", "0.15,0.5", "--json", str(out)]
    command += ["--options", "3"]
    assert quality.main(command) == 0
    document = json.loads(out.read_text())
    assert document["benchmark"] == "quality"
    rows = {(r["set"], r["part"], r["strategy"], r["ratio"]): r for r in document["rows"]}
    assert {s for s, *_ in rows} == {"boats", "talks", "pooled"} and rows["pooled", "main", "random", 0.15]["n"] == 4
    for name in (
        "kl",
        "top1",
        "em",
        "f1",
        "rougeL",
        "rougeL_vs_full",
        "jaccard_vs_full",
        "recomputed_share",
        "ttft_ms",
    ):
        assert {name, f"{name}_lo", f"{name}_hi"} <= set(rows["boats", "main", "naive", None])
    assert rows["boats", "sweep", "random", 0.5]["recomputed_share"] > 0.5
    chosen = rows["pooled", "main", "random", 0.15]
    assert (chosen["options"], chosen["chosen"]) == (3, 4) and 0 <= chosen["accuracy_lo"] <= chosen["accuracy_hi"] <= 1
    assert {(r["set"], r["strategy"]) for r in document["non-inferiority"]} == {
        (s, name) for s in ("boats", "talks", "pooled") for name in ("naive", "random")
    }
    assert all(r["verdict"] == "cannot tell" for r in document["non-inferiority"])
    assert not list((tmp_path / "store").glob("quality-*"))


def test_a_set_that_is_not_there_is_one_line(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "packaged_encoder", tiny.HashedEncoder)
    monkeypatch.setattr(quality, "weights_of", str)
    assert quality.main(["--data", str(data), "--sets", "cars"]) == 1
    assert "no set 'cars'" in capsys.readouterr().err
