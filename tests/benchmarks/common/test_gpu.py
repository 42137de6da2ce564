"""Rows that are kept as they come, and the check's flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import gpu, machine
from tests.support.checks import record_of


def test_rows_are_written_as_they_come_and_found_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.json"
    record = record_of(out=file)
    assert record.row("a", {"case": "a"}, lambda: {"ms": np.float32(2.0), "error": float("inf")})
    document = json.loads(file.read_text())
    assert document["rows"] == [{"case": "a", "ms": 2.0, "error": "inf"}]
    assert list(document) == ["benchmark", "command", "machine", "versions", "rows"]

    def fails() -> Mapping[str, Any]:
        raise RuntimeError("out of memory")

    assert record.row("b", {"case": "b"}, fails) is None
    assert record.failed == ["b"] and "out of memory" in json.loads(file.read_text())["rows"][1]["failed"]
    again = record_of(out=file)
    assert again.has("a") and not again.has("b")
    assert again.row("a", {}, fails) == {"case": "a", "ms": 2.0, "error": "inf"}
    assert again.row("b", {"case": "b"}, lambda: {"ms": 1.0})
    again.finish()
    assert not record_of().has("a")


def test_nothing_is_begun_when_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(seconds=1e-9)
    assert record.row("a", {}, lambda: {"ms": 1.0}) is None
    record.finish()
    assert record.skipped == ["a"] and "no time for 1 measurements (a)" in capsys.readouterr().out


def test_the_file_is_named_by_day_device_and_part(tmp_path: Path) -> None:
    chosen = gpu.parse("e2e", "x", ["--platform", "cpu", "--out", str(tmp_path)])
    file = gpu.result_file("e2e", chosen)
    assert file is not None and file.parent == tmp_path and file.name.endswith("-cpu-e2e.json")


def test_version_comes_from_the_project_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "ragjax":
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    found = machine.versions()
    assert found["jax"] == "1" and found["ragjax"] == "0.1.0"
