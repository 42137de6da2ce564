"""The benchmark of sessions: what each scenario sends, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks import sessions
from benchmarks.common.questions import excerpt
from benchmarks.sessions import SCENARIOS, Turn
from ragjax.serve.app import create_app
from tests.support import tiny

ANSWERS = [f"Answer {n}." for n in range(40)]


def texts(body: Mapping[str, Any]) -> list[str]:
    return [message["content"] or "" for message in body["messages"]]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_turn_is_a_chat_that_ends_with_a_question_or_a_tool(scenario: str) -> None:
    for turn in (0, 1, 29):
        messages = SCENARIOS[scenario](turn, ANSWERS)["messages"]
        assert messages[0]["role"] == "system"
        assert messages[-1]["role"] == ("tool" if scenario == "tools" else "user")


def test_scenarios_change_what_they_say() -> None:
    document = excerpt("jefferson", 900)
    assert texts(sessions.pasted(3, ANSWERS))[1].startswith(document)
    assert [document in text for text in texts(sessions.moved(3, ANSWERS))] == [False] * 7 + [True]
    first, second = (texts(sessions.header(turn, ANSWERS))[0] for turn in (1, 2))
    assert first[:16] == second[:16] and first[:60] != second[:60] and first[90:] == second[90:]
    before, after = (texts(sessions.edited(turn, ANSWERS))[0].splitlines() for turn in (1, 2))
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    assert texts(sessions.trimmed(29, ANSWERS))[1] == texts(sessions.trimmed(28, ANSWERS))[3]


def test_a_session_is_served_over_http_and_compared_with_full(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"moved": lambda turn, answers: {"messages": sessions.spoken(turn, answers)}}
    monkeypatch.setattr(sessions, "SCENARIOS", short)
    with tiny.engine() as engine, TestClient(create_app(engine)) as client:
        told = list(sessions.converse(engine, client, "full", "moved", 2, None, 2))
        found = list(sessions.converse(engine, client, "prefix", "moved", 2, told, 2))
    assert [turn.reused for turn in told] == [0, 0]
    assert found[1].reused > 0 and found[1].answer == told[1].answer and not found[1].approximate


def test_a_row_leaves_the_first_turn_out() -> None:
    told = [Turn("a", 10, 0, 100.0, False) for _ in range(7)]
    turns = [Turn("b", 10, 0, 90.0, False), *(Turn("a", 10, 5, float(n), True, 0.5) for n in range(10, 16))]
    row = sessions.row("moved", "header", turns, told, 0.0)
    assert (row["reused"], row["top1"], row["equal"], row["approximate"]) == (0.5, 0.5, 1.0, 1.0)
    assert (row["ttft_2_ms"], row["ttft_last_ms"]) == (11.0, 14.0)
