"""A set of questions in miniature, each over ten short passages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.samples import Samples
from benchmarks.figures.base import Setup
from tests.support import tiny
from tests.support.files import write_lines

SETS = ("hotpotqa", "nq_open", "2wikimultihopqa", "squad_xquad_en")
WORDS = ("ferry", "bridge", "tower", "pier", "mill", "inn", "lock", "barn", "gate", "well")


def question(name: str, i: int) -> dict[str, Any]:
    passages = [
        {"id": f"{name}-{i}-{word}", "title": "", "text": f"The {word} {i} opens at {i + j}.", "is_supporting": j < 2}
        for j, word in enumerate(WORDS)
    ]
    asked = f"When does the {WORDS[i]} {i} open?"
    return {"id": f"q{i}", "question": asked, "answers": [f"at {2 * i}"], "passages": passages}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The sets that the figures read, four questions each."""
    for name in SETS:
        questions = [question(name, i) for i in range(4)]
        folder = tmp_path / "data" / "text" / name
        write_lines(folder / "questions.jsonl", questions)
        write_lines(folder / "corpus.jsonl", [p for q in questions for p in q["passages"]])
    return tmp_path / "data"


@pytest.fixture
def setup(data: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    """Two questions, the tiny engine, a quick run."""
    from ragjax.engine import Engine

    monkeypatch.setattr(Engine, "load", lambda *a, **k: tiny.engine())
    samples = Samples("figures", {})
    return Setup(data, "tiny", "float32", 2, samples, quick=True, encoder=tiny.HashedEncoder)
