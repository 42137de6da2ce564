"""The benchmark of stuffed messages: its passages, its messages and its rows."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks import stuff
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.stuff import Served, System
from ragjax.core import Document, Message
from tests.support import tiny
from tests.support.stuffed import DOCUMENTS

PASSAGES = [Document(str(n), text) for n, text in enumerate(DOCUMENTS)]
QUESTIONS = QuestionSet(
    "few",
    (Question("a", "Who built it?", ("Ida",), (PASSAGES[0],)), Question("b", "What bread?", ("rye",), (PASSAGES[1],))),
    {one.id: one for one in PASSAGES},
)


def test_the_pool_has_what_supports_the_questions_and_is_filled_up() -> None:
    assert stuff.pool(QUESTIONS, 2, 2, 4) == PASSAGES[:2]
    assert stuff.pool(QUESTIONS, 1, 9, 4) == PASSAGES
    assert stuff.pool(QUESTIONS, 2, 1, 4) == PASSAGES[:1]


def test_messages_are_those_of_the_chains() -> None:
    (user,) = stuff.stuffed("Who?", ["One.", "Two."], "user")
    assert user.content.endswith("make up an answer.\n\nOne.\n\nTwo.\n\nQuestion: Who?\nHelpful Answer:")
    system, asked = stuff.stuffed("Who?", ["One.", "Two."], "system")
    assert system.content.endswith("\n\nOne.\n\nTwo.") and asked == Message("user", "Who?")


@pytest.mark.slow
def test_systems_are_measured_from_an_empty_cache_on() -> None:
    chosen = argparse.Namespace(questions=2, passages=3, found=3, shape="user")
    with tiny.engine() as engine:
        asked = stuff.requests(QUESTIONS, chosen, tiny.HashedEncoder(), engine.tokenizer)
        exact = list(stuff.measured(engine, System("full", False), asked))
        served = list(stuff.measured(engine, System("naive", True), asked))
    rows = [stuff.row(name, name == "naive", found, exact, 0.5) for name, found in (("full", exact), ("naive", served))]
    assert [one.reused for one in exact] == [0, 0] and served[0].reused == 0
    assert rows[0]["reused"] == 0 and rows[1]["reused"] > 0.7 and rows[1]["n"] == 1
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9) and rows[1]["kl"] > 1e-4
    assert set(rows[1]) == set(stuff.COLUMNS)


def test_what_two_prompts_share() -> None:
    a, b = np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 5], np.int32)
    assert stuff.common_prefix(a, b) == 2
    assert stuff.common_prefix(a, a) == 3, "the last token is computed"
    assert stuff.common_prefix(np.zeros(0, np.int32), a) == 0


def test_a_row_leaves_the_first_request_out(tmp_path: Path) -> None:
    served = [Served(10, 0, 90.0), Served(10, 5, 10.0), Served(30, 25, 20.0)]
    row = stuff.row("x", False, served, served, 0.0)
    assert (row["n"], row["reused"], row["ttft_ms"], row["kl"]) == (2, 0.75, 15.0, None)
    with pytest.raises(SystemExit):
        stuff.main(["--data", str(tmp_path), "--questions", "1"])
