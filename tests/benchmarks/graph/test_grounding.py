"""No RAG, RAG and GraphRAG on the tiny model, and the figures of all benchmarks of graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import finetuning, grounding
from benchmarks.common.plot import draw
from benchmarks.graph.plot import FIGURES
from tests.support import tiny
from tests.support.files import write_lines

pytestmark = pytest.mark.slow


class Letters:
    """Texts by their letters."""

    identity = "letters"

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        counts = np.array([[text.lower().count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float32)
        return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two questions in both sets, one in each alone."""
    asked = ["Who made Heat?", "Who made Alien?", "Who made Solaris?"]
    graph = [
        {"id": f"g{i}", "question": asked[i], "answers": ["Mann"], "topic_entities": ["Heat"],
         "triples": [["Heat", "by", "Mann"]], "paths": [["Heat", "by", "Mann"]]}
        for i in (0, 1)
    ]  # fmt: skip
    passages = [{"id": f"p{i}", "title": "Film", "text": f"Film {i}: Heat is by Mann."} for i in range(7)]
    text = [{"id": f"t{i}", "question": asked[i], "answers": ["Mann"], "passages": passages} for i in (2, 1, 0)]
    for kind, lines in (("kg", graph), ("text", text)):
        write_lines(tmp_path / kind / "films" / "questions.jsonl", lines)
    return tmp_path


def test_every_method_answers_what_both_sets_ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grounding, "opened", lambda *_: tiny.engine())
    monkeypatch.setattr(grounding, "packaged_encoder", Letters)
    command = ["--data", str(folder), "--set", "films", "--text", "films"]
    assert grounding.main([*command, "--json", str(folder / "out.json"), "--plot", str(folder / "plots")]) == 0
    rows = {r["method"]: r for r in json.loads((folder / "out.json").read_text())["rows"]}
    assert list(rows) == list(grounding.METHODS) and all(r["n"] == 2 for r in rows.values())
    assert rows["none"]["slower"] == 1
    assert rows["none"]["prompt_tokens"] < rows["graph"]["prompt_tokens"] < rows["passages"]["prompt_tokens"]
    cold = [m for m in rows if not m.endswith("-cached")]
    assert all(rows[m]["hit_rate"] == 0 for m in cold)
    assert rows["passages-cached"]["hit_rate"] > 0.5 < rows["graph-dependency-cached"]["hit_rate"]
    assert [p.name for p in (folder / "plots").iterdir()] == ["depcache_5.png"]
    lines = (folder / "text" / "films" / "questions.jsonl").read_text().splitlines()
    (folder / "text" / "films" / "questions.jsonl").write_text(lines[0] + "\n")
    assert grounding.main(command) == 1
    assert "no question in common" in capsys.readouterr().err


def test_every_figure_is_drawn_of_its_rows_alone(tmp_path: Path) -> None:
    part: dict[str, Any] = {"set": "films", "n": 1}
    rows = [
        {**part, "part": "work", "least_tokens": 0, "visited_share": 0.2, "non_dependent": 0.5, "shared_prefix": 0.3,
         "predicted_share": 0.1},
        *({**part, "part": "length", "method": m, "positions": p, "written_tokens": n, "ttft_ms": n / 9}
          for m, p in (("self", None), ("dependency", "path")) for n in (1024, 2048)),
        *({**part, "part": "workload", "method": m, "positions": "path", "ttft_ms": 5.0, "hit_rate": 0.5}
          for m in ("dependency", "dependency-cached")),
        *({**part, "part": "finetuning", "method": m.name, "tuned": "no", "repositioned": None, "accuracy": 0.5}
          for m in finetuning.METHODS),
    ]  # fmt: skip
    for kind, figure in {"work": 3, "workload": 10, "length": 12, "finetuning": 14}.items():
        draw([r for r in rows if r["part"] == kind], tmp_path / kind, FIGURES)
        assert [p.name for p in (tmp_path / kind).iterdir()] == [f"depcache_{figure}.png"]
        assert (tmp_path / kind / f"depcache_{figure}.png").stat().st_size > 5000
