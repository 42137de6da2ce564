"""Answers that follow a grammar: whatever is drawn parses, alone or beside others, after pauses and restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ragjax.core import Answer, Breakpoint, Message, Rag, Request, RequestError, Sampling, Tool, Tools
from ragjax.engine import Engine
from ragjax.schedule.grammar import Constraint, Grammars
from tests.support import tiny
from tests.support.pace import Hold, failing

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "boolean"}},
}
TOOL = Tool("weather", "Tells the weather.", json.dumps(SCHEMA))
SMALL = Tool("now", "", '{"type": "object", "properties": {}, "additionalProperties": false}')


pytestmark = pytest.mark.engine(lookup=4)


def fits(value: Any) -> bool:
    return (
        set(value) == set(SCHEMA["required"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and value["kind"] in ("cat", "dog")
        and len(value["tags"]) <= 2
        and all(type(tag) is bool for tag in value["tags"])
    )


def asked(seed: int, temperature: float = 1.5, max_tokens: int = 200, **fields: Any) -> dict[str, Any]:
    sampling = Sampling(max_tokens, temperature, seed=seed, json_schema=json.dumps(SCHEMA))
    return {"sampling": sampling, **fields}


def begin(engine: Engine, seed: int, **fields: Any) -> Any:
    return engine.begin_prompt(tiny.prompt(seed % 3), strategy="full", **asked(seed, **fields))


def called(engine: Engine, tools: Tools, seed: int, schema: str | None = None, max_tokens: int = 220) -> Answer:
    """The answer to a chat with tools."""
    sampling = Sampling(max_tokens, 1.5, seed=seed, json_schema=schema)
    request = Request((Message("user", "How is it?"),), None, sampling, Rag(top_k=0), tools=tools)
    return tiny.answer(engine, request)


def test_every_answer_is_an_instance_of_its_schema(engine: Engine) -> None:
    futures = [begin(engine, seed) for seed in range(10)]
    answers = [future.result(120) for future in futures]
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert all(fits(json.loads(answer.text)) for answer in answers), [answer.text for answer in answers]
    assert len({answer.text for answer in answers}) > 8, "they are drawn, not all alike"
    assert all(answer.notices == () for answer in answers)


def test_a_greedy_answer_is_an_instance_too(engine: Engine) -> None:
    assert fits(json.loads(begin(engine, 0, temperature=0.0).result(60).text))


def test_an_answer_is_the_same_beside_one_that_follows_no_grammar(engine: Engine) -> None:
    free = Sampling(60, 1.0, seed=5)
    alone = begin(engine, 3).result(60), engine.answer_prompt(tiny.prompt(1), strategy="full", sampling=free)
    futures = [begin(engine, 3), engine.begin_prompt(tiny.prompt(1), strategy="full", sampling=free), begin(engine, 4)]
    both = [future.result(60) for future in futures]
    assert [answer.tokens for answer in both[:2]] == [answer.tokens for answer in alone]


def test_proposed_tokens_change_nothing(engine: Engine) -> None:
    before = [begin(engine, seed).result(60).tokens for seed in range(2)]
    with tiny.engine(lookup=0) as plain:
        assert [begin(plain, seed).result(60).tokens for seed in range(2)] == before


def test_max_tokens_cuts_an_answer(engine: Engine) -> None:
    answer = begin(engine, 1, max_tokens=10).result(60)
    assert answer.finish_reason == "length" and len(answer.tokens) == 10
    assert begin(engine, 1).result(60).text.startswith(answer.text)


def test_pauses_leave_an_answer_as_it_is(engine: Engine) -> None:
    expected = [begin(engine, seed).result(60).tokens for seed in range(4)]
    with tiny.engine(pages=26) as small:
        with Hold(small):
            futures = [begin(small, seed) for seed in range(4)]
        found = [future.result(120) for future in futures]
        assert small.stats()["pauses_total"] > 0
    assert [answer.tokens for answer in found] == expected


def test_a_lost_device_leaves_an_answer_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool goes in the middle of two answers: they go on behind what was said, where their grammars stand."""
    with tiny.engine(lookup=4) as fresh:
        expected = [begin(fresh, seed).result(60).tokens for seed in range(2)]
    with tiny.engine(lookup=4) as engine:
        failing(monkeypatch, engine._runner, "step", 15, lose=True)
        with Hold(engine):
            futures = [begin(engine, seed) for seed in range(2)]
        answers = [future.result(60) for future in futures]
        assert engine.stats()["device_losses_total"] == 1
    assert min(map(len, expected)) > 15, "the device is lost before their ends"
    assert [answer.tokens for answer in answers] == expected
    assert all(fits(json.loads(answer.text)) for answer in answers)
    assert all("memory was lost" in answer.notices[0] for answer in answers)


class Stumbling:
    """A matcher that cannot go on after some tokens."""

    def __init__(self, matcher: Any, tokens: int):
        self._matcher = matcher
        self._left = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_tokens(self, tokens: list[int]) -> bool:
        self._left -= len(tokens)
        return self._left > 0 and bool(self._matcher.consume_tokens(tokens))

    def get_error(self) -> str:
        return "lexer\n  state limit" if self._left <= 0 else ""


def test_an_answer_whose_grammar_is_given_up_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars.constraint

    def stumbling(self: Grammars, *given: Any, **named: Any) -> Constraint:
        constraint = made(self, *given, **named)
        constraint._matcher = Stumbling(constraint._matcher, 8)
        return constraint

    with tiny.engine(lookup=4) as engine:
        whole = [begin(engine, seed).result(60) for seed in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(Grammars, "constraint", stumbling)
            given_up = begin(engine, 0)
        answers = [given_up.result(60), begin(engine, 1).result(60)]
    cut, other = answers
    assert cut.finish_reason == "stop" and 8 <= len(cut.tokens) < len(whole[0].tokens)
    assert whole[0].text.startswith(cut.text) and cut.text != whole[0].text
    assert cut.notices == (
        "the answer ended before it was complete: its grammar could not be followed (lexer state limit)",
    )
    assert other.tokens == whole[1].tokens and other.notices == ()


def test_a_call_that_is_required_names_a_tool_and_has_its_arguments(engine: Engine) -> None:
    for seed in range(3):
        call = json.loads(called(engine, Tools((TOOL, SMALL), required=True), seed).text)
        assert (call["name"] == "weather" and fits(call["arguments"])) or call == {"name": "now", "arguments": {}}


def test_a_named_tool_is_the_one_that_is_called(engine: Engine) -> None:
    for seed in range(2):
        call = json.loads(called(engine, Tools((TOOL, SMALL), required=True, named="now"), seed).text)
        assert call == {"name": "now", "arguments": {}}


def test_an_answer_with_tools_is_a_call_or_a_text(engine: Engine) -> None:
    texts = [called(engine, Tools((SMALL,)), seed, max_tokens=20).text for seed in range(4)]
    call = '{"name": "now", "arguments": {}}'
    assert all(call.startswith(text) for text in texts if text.lstrip().startswith("{")), texts
    assert any(not text.lstrip().startswith("{") for text in texts)


def test_tokens_of_a_prompt_are_counted_before_it_is_answered(engine: Engine) -> None:
    tools = Tools((SMALL,))
    answer = called(engine, tools, 0, max_tokens=2)
    request = Request((Message("user", "How is it?"),), rag=Rag(top_k=0), tools=tools)
    assert engine.prompt_tokens(request) == answer.prompt_tokens > 20


def test_a_prompt_that_is_to_be_kept_is_or_the_answer_says_why_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (Breakpoint(60.0),)
    request = Request((Message("user", "How is it?"),), sampling=Sampling(2), rag=Rag(top_k=0), breakpoints=kept)
    assert not tiny.answer(engine, request).notices
    monkeypatch.setattr("ragjax.cache.hierarchy.KEPT", 0.0)
    assert "the prompt is not kept longer" in tiny.answer(engine, request).notices[-1]


@pytest.mark.parametrize("wanted", [{"minimum": 2**53 + 1}, {"const": 2**53 + 1}, {"enum": [1, -(2**53) - 1]}])
def test_numbers_that_would_be_rounded_are_named_or_refused(engine: Engine, wanted: dict[str, Any]) -> None:
    """2^53 + 1 was read as 2^53."""
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer", **wanted}}})
    (keyword,) = wanted
    asked = Request((Message("user", "Which?"),), sampling=Sampling(2, json_schema=schema), rag=Rag(top_k=0))
    assert any(f"{keyword} beyond 2^53" in notice for notice in tiny.answer(engine, asked).notices)
    strict = replace(asked, sampling=replace(asked.sampling, strict=True))
    with pytest.raises(RequestError, match=f"{keyword} beyond"):
        tiny.answer(engine, strict)


def test_what_stands_before_a_breakpoint_is_kept_alone() -> None:
    messages = (Message("system", "Be brief."), Message("user", "The lamp is red. How is it?"))
    sizes = {place: 0 for place in ((0, 9), (1, 16), (None, 0))}
    with tiny.engine() as engine:
        for message, characters in sizes:
            kept = (Breakpoint(60.0, message, characters),)
            request = Request(messages, sampling=Sampling(2), rag=Rag(top_k=0), breakpoints=kept)
            answer = tiny.answer(engine, request)
            nodes = [node for node in engine._parts.cache.tree.nodes() if node.kept]
            sizes[message, characters] = sum(map(len, nodes))
        tokens = engine._preparation.composer.ground(request).prompt.tokens.tolist()
    *before, all_of_it = sizes.values()
    text = [chr(token) if token < 256 else "|" for token in tokens]
    assert "".join(text[: before[0]]).endswith("Be brief.|\n|user\n") and "".join(text[: before[1]]).endswith("is red.")
    assert all_of_it == len(tokens) == answer.prompt_tokens and answer.written == 1


def test_an_answer_is_as_long_as_fits_where_nothing_else_is_said(engine: Engine) -> None:
    said = "?" * (engine.context_length - 60)
    answer = tiny.answer(engine, Request((Message("user", said),), sampling=Sampling(None), rag=Rag(top_k=0)))
    assert answer.prompt_tokens + len(answer.tokens) == engine.context_length or answer.finish_reason == "stop"
    assert len(answer.tokens) > 0


def test_an_answer_with_tools_and_a_schema_is_either(engine: Engine) -> None:
    for seed in range(2):
        value = json.loads(called(engine, Tools((SMALL,)), seed, json.dumps(SCHEMA)).text)
        assert fits(value) if "kind" in value else value == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objec"}, "Invalid type: objec"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "Unsatisfiable schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "it has no instance"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(engine: Engine, schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match="the schema of the answer cannot be followed") as refused:
        engine.answer_prompt(tiny.prompt(), json_schema=json.dumps(schema))
    assert reason in str(refused.value)
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_schema")
