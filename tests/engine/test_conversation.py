"""Conversations: a follow-up is searched with what was asked before; earlier passages stay, and so does their KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragjax.core import Answer, Document, Message, Rag, Request
from ragjax.engine import Engine
from ragjax.engine.grounding import dropped
from ragjax.models.tokenizer import Tokenizer
from tests.support import tiny

PEOPLE = [
    Document("mayor", "Ada Brown, mayor of Tolva, was elected mayor in 2010."),
    Document("keeper", "The keeper trims the lamp at dusk and sleeps by day."),
    Document("baker", "Bread was sold first, at dawn, by the old baker of Oske."),
    Document("ferry", "The ferry to Merrin will leave the harbour at nine."),
]
ASKED = ["Who is mayor of Tolva, mayor Brown?", "When was she first elected?", "When does the ferry to Merrin leave?"]
SAID = ["Ada Brown.", "In 2010.", "At nine."]


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.add_documents(PEOPLE)
    return engine


def conversation(turns: int) -> list[Message]:
    """The messages that the client sends in this turn, from 1."""
    answered = zip(ASKED[: turns - 1], SAID, strict=False)
    before = [one for asked, said in answered for one in (Message("user", asked), Message("assistant", said))]
    return [*before, Message("user", ASKED[turns - 1])]


def ask(engine: Engine, turns: int, strategy: str = "prefix", **options: object) -> Answer:
    return engine.answer(conversation(turns), strategy=strategy, top_k=1, max_tokens=4, **options)


def files(answer: Answer) -> list[tuple[str, bool]]:
    return [(one.file_id, one.earlier) for one in answer.sources]


def test_a_follow_up_is_searched_with_the_conversation(engine: Engine) -> None:
    alone = engine.answer(ASKED[1], top_k=1, max_tokens=1)
    assert alone.sources[0].file_id == "baker"
    assert files(ask(engine, 2)) == [("mayor", False)], "found again, and it stands in its place"
    assert files(ask(engine, 3)) == [("mayor", True), ("ferry", False)]


def test_a_turn_reuses_all_that_the_one_before_it_read(engine: Engine) -> None:
    read = 0
    for turns in (1, 2, 3):
        answer = ask(engine, turns)
        assert sum(one.reused for one in answer.segments) == read
        first = answer.segments[answer.sources[0].segment]
        assert first.id == "mayor#0" and first.reused == (first.tokens if turns > 1 else 0)
        exact = ask(engine, turns, "full")
        assert answer.exact_to == "full" and answer.tokens == exact.tokens and answer.sources == exact.sources
        read = answer.prompt_tokens
    kinds = [one.id for one in answer.segments]
    assert kinds == ["system", "mayor#0", "history", "history", "ferry#0", "question"]


def test_what_was_deleted_is_in_no_later_prompt(engine: Engine) -> None:
    ask(engine, 1)
    engine.delete_documents(["mayor"])
    answer = engine.answer(conversation(3), top_k=1, max_tokens=1)
    assert "mayor" not in {one.file_id for one in answer.sources} and len(answer.sources) > 1


def test_earlier_passages_make_no_prompt_too_long(engine: Engine) -> None:
    messages = [Message("user", ASKED[0]), Message("assistant", "Well. " * 116), Message("user", ASKED[2])]
    found = [files(engine.answer(messages, top_k=1, max_tokens=tokens)) for tokens in (1, 80)]
    assert found == [[("mayor", True), ("ferry", False)], [("ferry", False)]]


def test_without_a_search_nothing_of_earlier_turns_is_searched(engine: Engine) -> None:
    given = engine.answer(conversation(3), documents=["baker"], max_tokens=1)
    assert files(given) == [("baker", False)]
    assert engine.answer(conversation(3), top_k=0, max_tokens=1).sources == ()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
def test_passages_leave_seldom_and_many_at_once(most: int) -> None:
    gone = [dropped(turns, most) for turns in range(100)]
    assert all(turns - most <= left <= max(0, turns - most // 2) for turns, left in enumerate(gone))
    assert gone == sorted(gone) and len(set(gone)) <= 2 + 100 // (most - most // 2)
    assert [dropped(turns, 0) for turns in (0, 5)] == [0, 5]


def test_a_follow_up_adds_no_passage_that_does_not_fit(engine: Engine) -> None:
    composer = engine._preparation.composer
    strict = replace(composer, grounding=replace(composer.grounding, fits=0.35))
    found = [strict.ground(Request(tuple(conversation(turns)), rag=Rag(top_k=2))).sources for turns in (1, 2, 3)]
    first, second, third = ([one.file_id for one in sources] for sources in found)
    assert len(first) == 2 and first[0] == "mayor" and second == first and third == [*first, "ferry"]


def test_an_answer_says_that_no_passage_fits() -> None:
    with tiny.engine() as engine:
        engine.add_documents(PEOPLE)
        composer = engine._preparation.composer
        strict = replace(composer, grounding=replace(composer.grounding, fits=0.5))
        for text, told in ((ASKED[0], ()), ("What is love?", ("no passage fits the question: the nearest has",))):
            request = Request((Message("user", text),), rag=Rag(top_k=2))
            notices = strict.ground(request).notices
            assert len(notices) == len(told) and all(map(str.startswith, notices, told))
            assert composer.ground(request).notices == ()
        given = Request((Message("user", "What is love?"),), rag=Rag(documents=("ferry",)))
        assert strict.ground(given).notices == ()


def test_a_text_that_a_conversation_brings_with_each_turn_is_encoded_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, plain = list[str](), Tokenizer._encode_plain

    def counted(tokenizer: Tokenizer, text: str, continued: bool) -> list[int]:
        encoded.append(text)
        return plain(tokenizer, text, continued)

    monkeypatch.setattr(Tokenizer, "_encode_plain", counted)
    document = "Bread was sold first, at dawn, by the old baker of Oske. "
    first, second = (Message("user", f"{document}{asked}") for asked in ASKED[:2])
    for messages in (
        [first],
        [first, Message("assistant", SAID[0]), second],
        [first, Message("assistant", "No."), second],
    ):
        engine.answer(messages, top_k=0, max_tokens=1)
    assert [text.endswith(first.content) for text in encoded].count(True) == 1
    assert [text.endswith(second.content) for text in encoded].count(True) == 1
