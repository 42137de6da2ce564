"""Requests whose messages bring passages: reuse at any place, and when chunks are retrieved besides."""

from __future__ import annotations

import pytest

from ragjax.core import ConfigError, Divergence, Document, EngineOptions, Message
from ragjax.engine.grounding import brings_passages
from ragjax.quality.contract import Contract
from ragjax.quality.report import Budget, Measurement, Report, Setting
from tests.support import tiny
from tests.support.stuffed import DOCUMENTS, HARBOUR, PROMPTS


def stuffed(order: tuple[int, ...], system: str = "") -> tuple[Message, ...]:
    opening = (Message("system", system),) if system else ()
    return (*opening, Message("user", PROMPTS["stuff"]([DOCUMENTS[i] for i in order])))


def test_auto_moves_what_conversations_bring_again_if_that_saves_something() -> None:
    moved = Measurement(Setting("moved"), 10, 0.01, 0.02, 0.9, 0.8, 3.0, 0.0)
    report = Report("ab12", "tiny", "float32", "2026-01-01T00:00:00+00:00", "cd", 3, (), moved)
    contract = Contract(Setting("auto"), "float32", report=report, budget=Budget(0.5))
    with tiny.engine(contract=contract) as made:
        first = made.answer(stuffed((0, 1, 2), system="Be brief."), max_tokens=4)
        assert (first.strategy, first.exact_to, first.cached_tokens) == ("prefix", "full", 0)
        again = made.answer(stuffed((2, 0, 1), system="It is noon. Be brief."), max_tokens=4)
        assert (again.strategy, again.exact_to, again.notices) == ("moved", None, ())
        assert again.predicted == Divergence(0.01, 0.9)
        assert again.cached_tokens > 0.8 * again.prompt_tokens and again.figures["moved"] > 0
        short = made.answer("Who keeps it?", max_tokens=4)
        assert (short.strategy, short.exact_to) == ("prefix", "full")


@pytest.mark.parametrize(
    ("retrieve", "plain", "brought"), [("auto", True, False), ("always", True, True), ("asked", False, False)]
)
def test_when_passages_are_retrieved(retrieve: str, plain: bool, brought: bool) -> None:
    with tiny.engine(retrieve=retrieve, top_k=1) as made:
        made.add_documents([Document("ferry", "The ferry to Orlan leaves at nine.", "Ferry")])

        def ids(messages: str | tuple[Message, ...], **options: int | str) -> list[str]:
            answer = made.answer(messages, max_tokens=1, **options)
            assert any("bring passages" in notice for notice in answer.notices) == (
                retrieve == "auto" and messages != "When does the ferry leave?" and not options
            )
            return [r.id for r in answer.segments]

        assert ("ferry#0" in ids("When does the ferry leave?")) == plain
        assert ("ferry#0" in ids(stuffed((0, 1)))) == brought
        assert "ferry#0" in ids(stuffed((0, 1)), top_k=1)
        assert "ferry#0" in ids(stuffed((0, 1)), knowledge="default")
    with pytest.raises(ConfigError, match="retrieve must be"):
        EngineOptions("tiny", retrieve="never")


@pytest.mark.parametrize("shape", PROMPTS)
def test_chats_bring_passages_in_many_shapes(shape: str) -> None:
    text = PROMPTS[shape](DOCUMENTS[:2])
    assert brings_passages((Message("user", text),))
    assert brings_passages((Message("user", text), Message("assistant", "Ida."), Message("user", "When?")))
    assert brings_passages((Message("user", "Who?"), Message("tool", text)))


def test_a_long_question_or_system_message_brings_none() -> None:
    system = Message("system", PROMPTS["stuff"](DOCUMENTS))
    for text in (HARBOUR, f"Please.\n\n{HARBOUR}\n\n", "a\n\n" * 500_000, "\n " * 100_000 + "?", " " * 300_000 + "\nx"):
        assert not brings_passages((system, Message("user", text)))
