"""Anthropic's Messages API: bodies as its clients send them, and answers and events as they read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragjax import core
from ragjax.models.tokenizer import HERMES
from tests.support.fakes import FakeEngine
from tests.support.serving import TEXT, Caught, Served, serving, typed_of
from tests.support.telling import SOURCES

ASKED = {"role": "user", "content": "What colour is the lighthouse?"}
BODY: dict[str, Any] = {"model": "fake", "max_tokens": 40, "messages": [ASKED]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ghent"}}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def post(served: Served, path: str = "/v1/messages", **fields: Any) -> Any:
    response = served.post(path, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    return typed_of(served.post("/v1/messages", json={**BODY, **fields, "stream": True}))


def request_of(caught: Caught, **fields: Any) -> core.Request:
    post(caught.served, **fields)
    return caught.engine.requests[-1]


def test_a_message_is_answered_in_its_form(shared: Served) -> None:
    answer = post(shared)
    assert answer["content"] == [{"type": "text", "text": TEXT}] and answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 7 and usage["cache_creation_input_tokens"] == 0
    assert (usage["input_tokens"], usage["output_tokens"]) == (0, 6), "the engine in miniature found all of it"
    assert post(shared, max_tokens=2)["stop_reason"] == "max_tokens"


def test_fields_reach_the_engine_as_those_of_a_chat_do(caught: Caught) -> None:
    asked = request_of(
        caught, system=[{"type": "text", "text": "Be brief.", **CACHED}], temperature=0.5, top_p=0.5, top_k=3,
        stop_sequences=["\n"], thinking={"type": "enabled", "budget_tokens": 1024}, tools=[{**TOOL, **CACHED}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, rag={"strategy": "naive"},
    )  # fmt: skip
    assert asked.messages == (core.Message("system", "Be brief."), core.Message("user", ASKED["content"]))
    assert asked.sampling == core.Sampling(40, 0.5, 0.5, 3, stop=("\n",))
    assert asked.tools == core.Tools((core.Tool("weather", "Of a city.", json.dumps(SCHEMA)),), True, "weather", False)
    assert asked.template == {"enable_thinking": True}
    assert asked.rag.strategy == "naive"


def test_calls_and_results_become_those_of_a_chat(caught: Caught) -> None:
    called = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ghent"}},
    ]
    result = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "And now?"},
    ]
    said = [ASKED, {"role": "assistant", "content": called}, {"role": "user", "content": result}]
    assert request_of(caught, messages=said, tools=[TOOL]).messages[1:] == (
        core.Message("assistant", "I will look.", (core.ToolCall("toolu_1", "weather", '{"city": "Ghent"}'),)),
        core.Message("tool", "rain", (), "toolu_1"),
        core.Message("user", "And now?"),
    )
    assert request_of(caught, messages=[*said[:2], {"role": "user", "content": result[:1]}]).messages[-1].role == "tool"


def test_a_text_and_calls_are_blocks_of_a_message_and_of_a_stream() -> None:
    tokens = ("I will ", f"look.\n{CALL}\n", CALL)
    with serving(FakeEngine(tokens=tokens, call_form=HERMES, sources=SOURCES)) as served:
        answer, told = post(served, tools=[TOOL]), events(served, tools=[TOOL])
    text, *calls = answer["content"]
    assert text == {"type": "text", "text": "I will look."} and answer["stop_reason"] == "tool_use"
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": "Ghent"})] * 2
    assert calls[0]["id"] != calls[1]["id"]
    names = [event["type"] for event in told]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert told[0]["message"]["rag"] == {"sources": told[-2]["rag"]["sources"]}, "also if it is stopped"
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    parts = [event["delta"] for event in told if event["type"] == "content_block_delta" and event["index"] == 2]
    assert json.loads("".join(part["partial_json"] for part in parts)) == {"city": "Ghent"}


def test_breakpoints_tell_what_was_written() -> None:
    block = {"type": "text", "text": "a b c d e f g h i", **CACHED}
    with serving(FakeEngine(written=2)) as served:
        marked = post(served, messages=[{"role": "user", "content": [block]}])["usage"]
        plain = post(served, messages=[{"role": "user", "content": "a b c d e f g h i"}])["usage"]
        chat = served.post(json={"model": "fake", "messages": [ASKED]}).json()["usage"]
        response = served.post("/v1/responses", json={"model": "fake", "input": "Hi"}).json()["usage"]
        refused = served.post("/v1/messages", json={**BODY, "system": [block] * 5})
    assert (marked["input_tokens"], marked["cache_creation_input_tokens"]) == (0, 2)
    assert (plain["input_tokens"], plain["cache_creation_input_tokens"]) == (2, 0)
    assert chat["prompt_tokens_details"] == {"cached_tokens": 7, "cache_write_tokens": 2}
    assert response["input_tokens_details"] == {"cached_tokens": 7, "cache_write_tokens": 2}
    assert refused.status_code == 400 and "4 are taken" in refused.json()["error"]["message"]


def test_what_stands_before_a_breakpoint_is_kept_for_as_long_as_is_asked(caught: Caught) -> None:
    def kept(**fields: Any) -> list[tuple[float, int | None, int]]:
        return [(one.seconds, one.message, one.characters) for one in request_of(caught, **fields).breakpoints]

    short = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain", **CACHED}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}, **CACHED}]}
    assert kept() == [] and kept(cache_control={"type": "ephemeral"}) == [(300, None, 0)]
    assert kept(messages=[{"role": "user", "content": [short, {"type": "text", "text": "there"}]}]) == [(300, 0, 2)]
    assert kept(system=[{"type": "text", "text": "Be"}, short], tools=[{**TOOL, **CACHED}]) == [
        (300, 0, 5),
        (3600, 0, 5),
    ]
    assert kept(tools=[{**TOOL, **CACHED}]) == [(3600, 0, 0)], "before what the user says"
    assert kept(messages=[ASKED, call, {"role": "user", "content": [result]}]) == [(3600, 1, 0), (3600, 2, 4)]


def test_openais_breakpoints_are_those_of_parts(caught: Caught) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": "Be brief.", **mark}, {"type": "text", "text": "?"}]
    asked = caught.request(messages=[{"role": "user", "content": parts}], prompt_cache_options={"ttl": "30m"})
    assert asked.breakpoints == (core.Breakpoint(1800.0, 0, 9),)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi", **mark}]}]
    asked = caught.request("/v1/responses", input=items, instructions="Be brief.", prompt_cache_retention="24h")
    assert asked.breakpoints == (core.Breakpoint(86_400.0, 1, 2),)
    assert caught.request(prompt_cache_retention="24h").breakpoints == (core.Breakpoint(86_400.0),)
    assert caught.request(prompt_cache_retention="in_memory").breakpoints == ()


def test_tokens_are_counted_as_the_prompt_has_them(caught: Caught) -> None:
    counted = post(caught.served, "/v1/messages/count_tokens", system="Be brief.")
    assert counted == {"input_tokens": 7}, "words of the engine in miniature"
    assert caught.engine.requests[-1].messages[0] == core.Message("system", "Be brief.")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "claude"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"container": "x"}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_are_in_its_form(shared: Served, fields: dict[str, Any], status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens")[: 1 if "max_tokens" in fields else 2]:
        response = shared.post(path, json={**BODY, **fields})
        assert response.status_code == status and response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind


def test_a_key_may_come_as_its_clients_send_it_and_failures_are_told() -> None:
    with serving(FakeEngine(error=core.OverloadError("full")), keys={"secret": ""}) as served:
        refused = served.post("/v1/messages", json=BODY, headers={"x-api-key": "wrong"})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        full = served.post("/v1/messages", json=BODY, headers={"x-api-key": "secret"})
        assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
    with serving(FakeEngine(breakdown=ValueError("secret detail"))) as served:
        last = events(served)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "secret" not in str(last)
