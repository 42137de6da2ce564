"""The command `preload` on a miniature: what it measures is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import preload
from benchmarks.common import plot
from ragjax.core import Prompt
from tests.support import tiny
from tests.support.disks import open_store

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[preload.Server]:
    monkeypatch.setattr(preload, "prompt", small)
    monkeypatch.setattr(preload, "WARM", 1)
    store = open_store(tmp_path)
    with tiny.engine(disk=store) as engine:
        yield preload.Server(engine, 8)


true_prompt = preload.prompt


def small(context: int, new: int, question: int) -> Prompt:
    made = true_prompt(context, new, question)
    return Prompt(tuple(type(s)(s.id, s.kind, s.tokens % np.int32(256)) for s in made.segments))


def test_a_row_has_all_modes(server: preload.Server) -> None:
    server.hold_up(50)
    row = preload.measure(server, {"tier": "disk", "disk_mb_s": 50}, 64, 2)
    assert set(preload.COLUMNS) == set(row)
    assert row["faster"] == pytest.approx(row["whole_ms"] / row["layers_ms"]) and row["load_ms"] > 0


def test_cuts_are_beside_the_same_pass_without_them(server: preload.Server) -> None:
    row = preload.cuts(server, 64, 1)
    assert row["cost"] == pytest.approx(row["cut_ms"] / row["device_ms"] - 1)


def test_the_figure_has_a_panel_for_each_disk(tmp_path: Path) -> None:
    row = {"context_tokens": 64, "device_ms": 1.0, "whole_ms": 3.0, "layers_ms": 2.0}
    rows = [{**row, "tier": "disk", "disk_mb_s": speed} for speed in (None, 50)]
    assert len(list(preload.panels(rows))) == 2
    plot.draw(rows, tmp_path, preload.FIGURES)
    assert (tmp_path / "preload.png").stat().st_size > 0
