"""The benchmark of decay: its prompts, and the rows of a run with the tiny model."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import decay
from tests.support import tiny

CHOSEN = Namespace(data=None, length=40, documents=4, questions=12, found=2, seed=0)


def test_no_order_of_documents_comes_twice_and_every_question_is_new() -> None:
    tokenizer = tiny.byte_tokenizer()
    texts = decay.documents(tokenizer, CHOSEN)
    assert len(texts) == 4 and {len(text) for text in texts} == {40}
    work = decay.prompts(tokenizer, texts, CHOSEN)
    orders = {tuple(segment.id for segment in prompt.segments[1:-1]) for prompt in work}
    assert len(orders) == 12 and len({prompt.segments[-1].tokens.tobytes() for prompt in work}) == 12


@pytest.mark.parametrize("strategy", ["naive", "moved"])
def test_documents_are_found_in_every_order(strategy: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    texts = decay.documents(tokenizer, CHOSEN)
    work = decay.prompts(tokenizer, texts, CHOSEN)
    with tiny.engine() as engine:
        told = list(decay.asked(engine, strategy, work))
    later = told[6:]
    assert all(one["found"] >= 0.8 * (62 + 2 * 40 - 2 * 8) for one in later)
    assert told[9]["stored"] > 0 and told[0]["full"] > 0


def test_rows_compare_with_the_first_tenth() -> None:
    told = [{"tokens": 10, "found": 5, "ttft": 2.0, "full": 4.0, "stored": 30} for _ in range(20)]
    told[-1]["ttft"] = told[-2]["ttft"] = 4.0
    rows = list(decay.rows_of("x", told, 20, 0.0))
    assert len(rows) == 10 and rows[0]["faster"] == 2.0 and rows[-1]["kept"] == 0.5
    assert (rows[0]["found"], rows[0]["stored"]) == (0.5, 1.5)
