"""The figures of `graphrag`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.plot import draw
from benchmarks.graph.plot import FIGURES

pytestmark = pytest.mark.slow


def test_every_figure_is_drawn_of_its_rows_alone(tmp_path: Path) -> None:
    part: dict[str, Any] = {"set": "films", "n": 1}
    rows = [
        {**part, "part": "work", "least_tokens": 0, "visited_share": 0.2, "non_dependent": 0.5, "shared_prefix": 0.3,
         "predicted_share": 0.1},
        *({**part, "part": "length", "method": m, "positions": p, "written_tokens": n, "ttft_ms": n / 9}
          for m, p in (("self", None), ("dependency", "path")) for n in (1024, 2048)),
        *({**part, "part": "workload", "method": m, "positions": "path", "ttft_ms": 5.0, "hit_rate": 0.5}
          for m in ("dependency", "dependency-cached")),
    ]  # fmt: skip
    for kind, figure in {"work": 3, "workload": 10, "length": 12}.items():
        draw([r for r in rows if r["part"] == kind], tmp_path / kind, FIGURES)
        assert [p.name for p in (tmp_path / kind).iterdir()] == [f"depcache_{figure}.png"]
        assert (tmp_path / kind / f"depcache_{figure}.png").stat().st_size > 5000
