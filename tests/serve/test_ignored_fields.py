"""Fields that change nothing are named in a notice; what would change the answer is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, MESSAGES, TEXT, Caught, Served, error_of, events_of, serving

WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"run": "7"},
    "store": True,
    "service_tier": "auto",
    "user": "someone",
    "reasoning_effort": "low",
    "verbosity": "low",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "prediction": {"type": "content", "content": "x"},
    "modalities": ["text"],
}


def notices_of(answer: Any) -> list[str]:
    rag = answer["rag"] if isinstance(answer, dict) else answer.model_extra["rag"]
    return [notice for notice in rag["notices"] if notice.startswith("fields")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fields", [{"a\ud800": 1}, {"rag": {"b\ud800": 1}}, {"rag": {"graph": {"c\ud800": 1}}}])
def test_a_name_that_is_no_unicode_can_be_told(fields: dict[str, Any], strict: bool) -> None:
    with serving(FakeEngine(), strict=strict) as served:
        response = served.post(content=json.dumps({**CHAT, **fields}), headers={"content-type": "application/json"})
    if response.status_code == 200:
        assert not strict and notices_of(response.json()) == ["fields of the request, unknown and ignored: a?"]
    else:
        assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


def test_fields_without_effect_change_nothing_but_a_notice(caught: Caught) -> None:
    plain = caught.request()
    answer = caught.served.client().chat.completions.create(
        **CHAT, **WITHOUT_EFFECT, n=1, response_format={"type": "text"}
    )
    assert answer.choices[0].message.content == TEXT and caught.engine.requests[-1] == plain
    (notice,) = notices_of(answer)
    assert set(notice.removeprefix("fields of the request, no effect here: ").split(", ")) == set(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"functions": []},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"messages": [{**MESSAGES[0], "name": "ann"}]},
    ],
)
def test_values_that_ask_for_nothing_are_taken(caught: Caught, fields: dict[str, Any]) -> None:
    assert caught.request(**fields) == caught.request()


def test_null_is_absent_and_makes_no_notice(shared: Served) -> None:
    absent = dict.fromkeys(("tools", "tool_choice", "functions", "audio", "metadata", "frobnicate", "user"))
    assert notices_of(shared.post(json={**CHAT, **absent}).json()) == []


def test_an_unknown_field_is_ignored_with_a_notice_at_each_level(shared: Served) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}], "weight": 1}
    body = {**CHAT, "messages": [message, message], "frobnicate": 1, "stream": True, "stream_options": {"x": 1}}
    *_, last, done = events_of(shared.post(json=body))
    named = "frobnicate, stream_options.x, messages[].weight, messages[].content[].cache_control"
    assert done == "[DONE]" and notices_of(last) == [f"fields of the request, unknown and ignored: {named}"]


def test_an_unknown_field_of_a_choice_is_ignored(shared: Served) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "function", "x": 1, "function": {"name": "f", "y": 1}}
    answer = shared.post(json={**CHAT, "tools": [tool], "tool_choice": choice})
    assert notices_of(answer.json()) == [
        "fields of the request, unknown and ignored: tool_choice.x, tool_choice.function.y"
    ]


def test_a_notice_is_short_whatever_is_sent(shared: Served) -> None:
    unknown = {f"{i}" + "x" * 10_000: 1 for i in range(100)}
    (notice,) = notices_of(shared.post(json={**CHAT, **unknown}).json())
    assert len(notice) < 2000 and notice.endswith(" and 84 more")


def test_within_rag_an_unknown_field_is_an_error(shared: Served) -> None:
    error = error_of(shared.post(json={**CHAT, "rag": {"frobnicate": 1}}))
    assert (error["param"], error["code"]) == ("rag.frobnicate", "unknown_parameter")


CONSTRAINING: dict[str, Any] = {
    **{name: {"type": "object"} for name in ("guided_json", "json_schema", "grammar", "structured_outputs")},
    "bad_words": ["a"],
    "stop_token_ids": [3],
    "truncate_prompt_tokens": 8,
    "prompt_logprobs": 1,
    "echo": True,
    "typical_p": 0.5,
}
"""Fields of other servers that constrain an answer."""


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {"function_call": {"name": "f"}}, "function_call"),
        ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options"),
        ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
        ("/v1/chat/completions", {"audio": {"voice": "x"}}, "audio"),
        ("/v1/chat/completions", {"min_p": 0.1}, "min_p"),
        *(("/v1/chat/completions", {name: given}, name) for name, given in CONSTRAINING.items()),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_what_would_change_the_answer_is_refused(shared: Served, path: str, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", **({"messages": MESSAGES} if "chat" in path else {}), **fields}
    response = shared.post(path, json=body)
    error = error_of(response)
    assert response.status_code == 400 and (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert len(error["message"]) > len(f"{param} cannot be had: "), "it says what to change"


@pytest.mark.parametrize("name", ["metadata", "reasoning_effort", "frobnicate", "functions", "prompt_cache_key"])
def test_strict_refuses_what_has_no_effect(strict: Served, name: str) -> None:
    error = error_of(strict.post(json={**CHAT, name: None}))
    assert (error["param"], error["code"]) == (name, "unknown_parameter")


def test_the_clients_own_message_comes_back(caught: Caught) -> None:
    client = caught.served.client()
    said = client.chat.completions.create(**CHAT).choices[0].message
    for again in (said, said.model_dump(), said.to_dict()):
        answer = client.chat.completions.create(model="fake", messages=[*MESSAGES, again, *MESSAGES])
        assert notices_of(answer) == []
        assert caught.engine.requests[-1].messages[1].content == TEXT


def test_content_may_be_null_for_an_assistant_alone(caught: Caught) -> None:
    request = caught.request(messages=[*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES])
    assert request.messages[1].content == ""
    for role in ("user", "system"):
        error = error_of(caught.served.post(json={**CHAT, "messages": [{"role": role, "content": None}]}))
        assert error["param"] == "messages[0].content" and "give a text" in error["message"]


def test_several_choices_have_seeds_of_their_own(caught: Caught) -> None:
    answer = caught.served.client().chat.completions.create(**CHAT, n=3, seed=7, temperature=1)
    assert sorted(request.sampling.seed for request in caught.engine.requests[-3:]) == [7, 8, 9]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {TEXT}
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 18, 7)
    assert all(choice.model_extra["rag"]["strategy"] == "prefix" for choice in answer.choices)


def test_several_choices_in_a_stream(shared: Served) -> None:
    asked = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = shared.client().chat.completions.create(**CHAT, **asked)
    for number in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == number]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "stop"
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert mine[-1].model_extra["rag"]["strategy"] == "prefix"
    assert usage.usage.completion_tokens == 12 and usage.choices == []


def test_prompts_in_a_batch(shared: Served) -> None:
    answer = shared.client().completions.create(model="fake", prompt=["a b", "c d e"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)


def test_one_choice_that_cannot_be_ends_all() -> None:
    engine = FakeEngine(max_queue=1, delay=0.01)
    with serving(engine) as served:
        with pytest.raises(openai.RateLimitError):
            served.client().chat.completions.create(**CHAT, n=2)
        assert engine.running == 0 and engine.cancelled == 1


def test_head_of_health(shared: Served) -> None:
    response = httpx.head(shared.url + "/health")
    assert response.status_code == 200 and response.content == b""


def test_pages_of_named_origins_may_call() -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    ask["access-control-request-headers"] = "authorization, x-stainless-os"
    with serving(FakeEngine(), keys={"sk": ""}, cors_origins=["https://a.example"]) as served:
        allowed = httpx.options(served.url + "/v1/chat/completions", headers=ask)
        assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ask["origin"]
        other = httpx.options(served.url + "/v1/chat/completions", headers={**ask, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = served.post(json=CHAT, headers={"origin": ask["origin"]})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ask["origin"]
    with serving(FakeEngine()) as served:
        assert "access-control-allow-origin" not in served.post(json=CHAT, headers={"origin": ask["origin"]}).headers
