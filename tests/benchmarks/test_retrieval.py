"""Recall of a search, on sets that are made up here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import retrieval
from benchmarks.common import samples
from tests.support.fakes import WordEncoder


def test_recall_of_a_follow_up_and_of_a_rare_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrieval, "packaged_encoder", WordEncoder)
    monkeypatch.setattr(samples, "STORE", tmp_path)
    passages = [{"id": f"d{n}", "title": "", "text": f"error code E{n}", "is_supporting": n == 7} for n in range(40)]
    history = [{"speaker": "user", "text": "error code E7"}, {"speaker": "agent", "text": "E8"}]
    asked = {"id": "q", "question": "what is that", "history": history, "passages": passages}
    for name in ("one", "two"):
        folder = tmp_path / "text" / name
        folder.mkdir(parents=True)
        (folder / "questions.jsonl").write_text(json.dumps(asked))
    out = tmp_path / "out.json"
    assert retrieval.main(["--data", str(tmp_path), "--sets", "one", "two", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["last", "conversation", "words"] * 2
    assert (rows[0]["recall_10"], rows[1]["recall_10"], rows[2]["recall_3"]) == (0, 1, 1)
    assert (rows[0]["n"], rows[0]["chunks"]) == (1, 40)
    assert rows[0]["found"] == pytest.approx(rows[0]["elsewhere"])
    assert retrieval.main(["--data", str(tmp_path), "--sets", "three"]) == 1
    assert "has no set 'three'" in capsys.readouterr().err


def test_times_of_a_search_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert retrieval.main(["--chunks", "60", "--limit", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["chunks"]) for row in rows] == [("meaning", 60), ("words", 60)]
