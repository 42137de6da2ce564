"""The benchmark of prompt lookup: what its rows say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import decode
from ragjax.core import Answer, Timings


class FakeEngine:
    """Answers as fast as it is told."""

    def __init__(self, ms_per_token: float, per_step: float):
        self.ms_per_token, self.per_step = ms_per_token, per_step

    def answer(self, question: str, **options: Any) -> Answer:
        tokens = tuple(range(options["max_tokens"]))
        timings = Timings(ttft=50.0, total=50.0 + self.ms_per_token * (len(tokens) - 1))
        figures = {"tokens_per_step": self.per_step} if self.per_step > 1 else {}
        return Answer("", "length", tokens, 10, 0, "prefix", "full", (), timings, figures=figures)


def test_a_row_compares_decoding_alone_for_one_client() -> None:
    engines: Any = [FakeEngine(20.0, 1.0), FakeEngine(5.0, 3.0)]
    row = decode.row(engines, "demo", [decode.Case("a"), decode.Case("b")], 1, 11)
    assert set(row) == set(decode.COLUMNS)
    assert row["tokens_per_s_off"] == pytest.approx(50) and row["tokens_per_s"] == pytest.approx(200)
    assert row["faster"] == pytest.approx(4) and row["tokens_per_step"] == 3 and row["equal"] == 1
    assert row["tokens"] == 20


def test_several_clients_ask_at_once() -> None:
    engines: Any = [FakeEngine(1.0, 1.0)] * 2
    row = decode.row(engines, "demo", [decode.Case(str(n)) for n in range(5)], 4, 3)
    assert row["n"] == 5 and row["tokens"] == 15
