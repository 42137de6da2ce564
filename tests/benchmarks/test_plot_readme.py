"""The figure of the README shows the newest stored reports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import plot_readme


def test_the_figure_is_what_the_stored_reports_give() -> None:
    assert plot_readme.FILE.read_text() == plot_readme.svg(), "run python -m benchmarks.plot_readme"


def test_the_newest_reports_are_drawn(tmp_path: Path) -> None:
    for file in plot_readme.RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    old = sorted(tmp_path.glob("*-cpu-ttft.json"))[-1]
    document = json.loads(old.read_text())
    for row in document["rows"]:
        if (row["system"], row["strategy"], row["context_tokens"]) == ("ragjax", "full", 2053):
            row["ttft_ms"] = 1234.0
    document["rows"].append({**document["rows"][0], "system": "openvino-int8", "ttft_ms": 2345.0})
    (tmp_path / "2999-01-01-cpu-ttft.json").write_text(json.dumps(document))
    found = plot_readme.first_tokens(tmp_path)
    assert found["ragjax full, nothing cached"] == 1234.0 and found["OpenVINO GenAI"] == 2345.0
    text = plot_readme.svg(tmp_path)
    assert "1,234 ms" in text and "2,345 ms" in text and "prefers-color-scheme: dark" in text


def test_divergences_are_means_over_sets() -> None:
    found = plot_readme.divergences(plot_readme.RESULTS)
    by_hand = {"naive": 0.385, "blend": 0.211, "craft": 0.168, "fusion": 0.089, "anchor": 0.058}
    assert found["full"] == 0
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-3)
