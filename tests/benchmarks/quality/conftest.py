"""Two sets of questions in miniature."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import dataset
from benchmarks.quality.dataset import QuestionSet
from tests.support.files import write_lines

TOPICS = ("ferry", "bridge", "tower")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets of three questions over three passages each, one of them without a corpus file."""
    for name in ("boats", "talks"):
        folder = tmp_path / "data" / "text" / name
        passages = [
            {"id": f"{name}-{t}{i}", "title": t.title(), "text": f"The {t} of {name} number {i} opens at {i} o'clock."}
            for t in TOPICS
            for i in (1, 2, 3)
        ]
        questions = [
            {
                "id": f"q{i}",
                "question": f"When does the {t} open?",
                "answers": [f"at {i} o'clock"],
                "passages": [{**p, "is_supporting": False} for p in passages[3 * i : 3 * i + 3]],
            }
            for i, t in enumerate(TOPICS)
        ]
        questions.append({"id": "none", "question": "?", "answers": [], "passages": []})
        write_lines(folder / "questions.jsonl", questions)
        if name == "boats":
            extra = {"id": "extra", "title": "Pier", "text": "The pier is closed."}
            write_lines(folder / "corpus.jsonl", [*passages, extra])
    return tmp_path / "data"


@pytest.fixture
def boats(data: Path) -> QuestionSet:
    return dataset.load(data, "boats")
