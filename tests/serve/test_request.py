"""What a body becomes for the engine, and bad input."""

from __future__ import annotations

import http.client
import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from ragjax import core
from ragjax.serve.schema import chat, rag, response
from ragjax.serve.schema.body import Body
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, MESSAGES, Caught, Served, error_of, serving


def test_defaults_reach_engine(caught: Caught) -> None:
    request = caught.request()
    assert request == core.Request((core.Message("user", MESSAGES[0]["content"]),), sampling=core.Sampling(None))


def test_sampling_reaches_engine(caught: Caught) -> None:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.5}
    biases, plain = {"65": -100, "7": 2.5}, {"type": "text"}
    request = caught.request(
        **{"max_completion_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 4, "seed": 7, "stop": "\n", "n": 1},
        **{"logprobs": True, "top_logprobs": 5, "logit_bias": biases, "response_format": plain, "user": "someone"},
        **penalties,
    )
    assert request.sampling == core.Sampling(3, 1.0, 0.5, 4, 7, ("\n",), 5, {65: -100.0, 7: 2.5}, 0.5, -1.0, 1.5)


def test_nulls_count_as_absent(caught: Caught) -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "response_format")
    assert caught.request(**dict.fromkeys(fields)) == caught.request()
    usage = {"stream": True, "stream_options": {"include_usage": None}}
    assert caught.request(**usage) == caught.request()
    inline = {"id": "x", "text": "words"}
    rag = {"knowledge": None, "top_k": None, "strategy": None, "recompute_ratio": None, "graph": None}
    untitled = caught.request(rag={"documents": [{**inline, "title": None}], **rag})
    assert untitled == caught.request(rag={"documents": [inline]})
    graph = dict.fromkeys(("name", "entities", "relation_paths", "hops", "paths"))
    assert caught.request(rag={"graph": graph}).rag == core.Rag(graph=core.Graph())


def test_every_field_that_may_be_left_out_takes_null() -> None:
    found = {kind for room in (chat, rag, response) for kind in vars(room).values() if isinstance(kind, type)}
    fields = [(kind, *field) for kind in found if issubclass(kind, Body) for field in kind.model_fields.items()]
    assert len(fields) > 40
    for kind, name, field in fields:
        if not field.is_required():
            assert TypeAdapter(field.rebuild_annotation()).validate_python(None) is None, (kind, name)


def test_messages_reach_engine(caught: Caught) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answered = {"role": "assistant", "content": "yes", "refusal": None}
    request = caught.request(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            answered,
            *MESSAGES,
        ]
    )
    assert request.messages[:3] == (
        core.Message("system", "Be brief."),
        core.Message("user", "one\ntwo"),
        core.Message("assistant", "yes"),
    )


def test_rag_reaches_engine(caught: Caught) -> None:
    documents = ["harbour", {"id": "x", "text": "words"}, {"id": "y", "text": "more", "title": "Y"}]
    asked = {"knowledge": "demo", "strategy": "naive", "recompute_ratio": 0.25, "documents": documents}
    expected = ("harbour", core.Document("x", "words"), core.Document("y", "more", "Y"))
    assert caught.request(rag=asked).rag == core.Rag("demo", None, "naive", expected, 0.25)
    assert caught.request(rag={"top_k": 2}).rag == core.Rag(top_k=2)
    assert caught.request(rag={"graph": "facts"}).rag == core.Rag(graph=core.Graph("facts"))
    given = {"relation_paths": [["A", "r", "B"]]}
    expected_graph = core.Graph(relation_paths=(("A", "r", "B"),))
    assert caught.request(rag={"graph": given}).rag == core.Rag(graph=expected_graph)
    sought = {"name": "g", "hops": 3, "paths": 5}
    assert caught.request(rag={"graph": sought}).rag == core.Rag(graph=core.Graph("g", hops=3, paths=5))
    assert caught.request(rag={"graph": {"entities": ["A"]}}).rag == core.Rag(graph=core.Graph(entities=("A",)))
    short = core.Rag(compression=core.Compression("snapkv", 512))
    assert caught.request(rag={"compression": "snapkv:512"}).rag == short
    assert caught.request(rag={"compression": "none"}).rag == core.Rag(compression="none")
    assert caught.request(rag=None).rag is None
    assert caught.request(rag={}).rag == core.Rag()


def test_completion_reaches_engine(caught: Caught) -> None:
    rag = {"strategy": "full", "recompute_ratio": 1}
    request = caught.request("/v1/completions", prompt="a", logprobs=3, echo=False, best_of=1, rag=rag)
    expected = core.Rag(top_k=0, strategy="full", recompute_ratio=1.0)
    assert request == core.Request(prompt="a", sampling=core.Sampling(None, logprobs=3), rag=expected)
    assert caught.request("/v1/completions", prompt=[5, 7]).prompt == (5, 7)
    caught.request("/v1/completions", prompt=[[5], [6, 7]])
    assert [request.prompt for request in caught.engine.requests[-2:]] == [(5,), (6, 7)]
    caught.request("/v1/completions", prompt=["a", "b"])
    assert [request.prompt for request in caught.engine.requests[-2:]] == ["a", "b"]


def test_a_knowledge_base_is_named_with_the_model(caught: Caught) -> None:
    assert caught.request(model="fake:demo").rag == core.Rag(knowledge="demo")
    assert caught.request(model="fake:demo", rag={"top_k": 2}).rag == core.Rag(knowledge="demo", top_k=2)
    assert caught.request(model="fake:demo", rag={"knowledge": "demo"}).rag == core.Rag(knowledge="demo")
    listed = [model.id for model in caught.served.client().models.list().data]
    assert listed == ["fake", "fake:demo", "fake-encoder"]
    assert caught.served.client().models.retrieve("fake:demo").id == "fake:demo"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", {"model": "fake:other"}, 404),
        ("chat/completions", {"model": "fake:"}, 404),
        ("chat/completions", {"model": "demo"}, 404),
        ("chat/completions", {"model": "fake:demo", "rag": None}, 400),
        ("chat/completions", {"model": "fake:demo", "rag": {"knowledge": "other"}}, 400),
        ("chat/completions", {"model": "fake:demo", "rag": {"graph": "facts"}}, 400),
        ("completions", {"model": "fake:demo", "prompt": "a"}, 400),
    ],
)
def test_a_models_name_that_contradicts_the_request_is_refused(
    caught: Caught, path: str, body: dict[str, Any], status: int
) -> None:
    asked = {"messages": [{"role": "user", "content": "?"}]} if "chat" in path else {}
    response = caught.served.post(f"/v1/{path}", json={**asked, **body})
    assert response.status_code == status and error_of(response)["message"]


def _with(path: str, value: Any) -> dict[str, Any]:
    """The plain chat body with one field replaced or added; `path` is dotted, numbers index lists."""
    body = json.loads(
        json.dumps({**CHAT, "stream_options": {}, "stream": True, "rag": {"documents": [{"id": "a", "text": "b"}]}})
    )
    body["messages"][0]["content"] = [{"type": "text", "text": "Hi"}]
    *parents, last = path.split(".")
    place = body
    for step in parents:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[last] = value
    return body


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("frobnicate", "frobnicate"),
        ("metadata", "metadata"),
        ("rag.frobnicate", "rag.frobnicate"),
        ("rag.quality", "rag.quality"),
        ("rag.documents.0.frobnicate", "rag.documents[0].frobnicate"),
        ("messages.0.name", "messages[0].name"),
        ("messages.0.content.0.frobnicate", "messages[0].content[0].frobnicate"),
        ("stream_options.frobnicate", "stream_options.frobnicate"),
    ],
)
def test_unknown_field_at_each_level(strict: Served, path: str, param: str) -> None:
    assert strict.post(json=_with("stream", True)).status_code == 200, "the body is sound without the field"
    response = strict.post(content=json.dumps(_with(path, 1)))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["code"] == "unknown_parameter" and param in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "Hi", "messages"),
        ("messages.0.role", "robot", "messages[0].role"),
        ("messages.0.content", None, "messages[0].content"),
        ("messages.0.content", "\ud800", "messages[0].content[0].text"),
        ("messages.0.content.0.type", "image_url", "messages[0].content"),
        ("messages.0.content.0.type", "picture", "messages[0].content[0].type"),
        ("n", 0, "n"),
        ("n", 65, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", "12", "max_tokens"),
        ("temperature", float("nan"), "temperature"),
        ("top_p", -0.5, "top_p"),
        ("seed", 2**70, "seed"),
        ("seed", -2, "seed"),
        ("stop", ["a"] * 5, "stop"),
        ("stop", [1], "stop[0]"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", -3, "frequency_penalty"),
        ("logit_bias", {"5": 101}, "logit_bias"),
        ("logit_bias", {"5": "1"}, "logit_bias.5"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema"),
        ("tools", [{"type": "browser"}], "tools[0].type"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "tools"),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", "sometimes", "tool_choice.type"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ("tool_choice", {"type": "function"}, "tool_choice"),
        ("response_format", {}, "response_format.type"),
        ("response_format", {"type": "json_object", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ("tool_choice", {"type": "auto", "function": {"name": "f"}}, "tool_choice.function"),
        ("n", 1.0, "n"),
        ("stream", False, "stream_options"),
        ("rag.top_k", -1, "rag.top_k"),
        ("rag.recompute_ratio", 1.5, "rag.recompute_ratio"),
        ("rag.recompute_ratio", True, "rag.recompute_ratio"),
        ("rag.compression", "snapkv", "rag.compression"),
        ("rag.compression", "zip:512", "rag.compression"),
        ("rag.compression", {"method": "snapkv", "budget": 512}, "rag.compression"),
        ("rag.documents.0.text", 5, "rag.documents[0].text"),
        ("rag.documents.0.id", "", "rag.documents[0].id"),
        ("rag.documents", [5], "rag.documents[0]"),
        ("rag", "demo", "rag"),
        ("rag", {"graph": 5}, "rag.graph"),
        ("rag", {"graph": {"hops": 0}}, "rag.graph.hops"),
        ("rag", {"graph": {"serialization": "path"}}, "rag.graph.serialization"),
        ("rag", {"graph": {"relation_paths": [["A", ""]]}}, "rag.graph.relation_paths[0][1]"),
        ("rag", {"graph": "facts", "top_k": 2}, "rag.graph"),
        ("rag", {"documents": ["a"], "top_k": 1}, "rag.top_k"),
        ("rag", {"documents": [{"id": "a\nINFO forged", "text": "b"}]}, "rag.documents[0].id"),
        ("rag", {"graph": {"entities": []}}, "rag.graph.entities"),
        ("rag", {"graph": {"relation_paths": []}}, "rag.graph.relation_paths"),
        ("rag", {"graph": {"relation_paths": [["A", "r", "B"]], "name": "g"}}, "rag.graph.name"),
        ("rag", {"graph": {"relation_paths": [["A", "r", "B"]], "entities": ["A"]}}, "rag.graph.entities"),
        ("rag", {"graph": {"relation_paths": [["A", "r", "B"]], "hops": 2}}, "rag.graph.hops"),
        ("rag", {"graph": {"relation_paths": [["A", "r", "B"]], "paths": 30}}, "rag.graph.paths"),
        ("user", 5, "user"),
    ],
)
def test_bad_value_names_its_field(shared: Served, path: str, value: Any, param: str) -> None:
    response = shared.post(content=json.dumps(_with(path, value)), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[0][1]"),
        ({"prompt": [-1]}, "prompt[0][0]"),
        ({"prompt": [[1], [True]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": "a", "echo": 0}, "echo"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "rag": {"top_k": 2}}, "rag.top_k"),
        ({"prompt": "a", "rag": {"compression": "snapkv:1"}}, "rag.compression"),
    ],
)
def test_bad_completion_names_its_field(shared: Served, fields: dict[str, Any], param: str) -> None:
    response = shared.post("/v1/completions", json={"model": "fake", **fields})
    assert response.status_code == 400 and error_of(response)["param"] == param


def test_an_error_of_a_field_is_in_our_own_words(shared: Served) -> None:
    error = error_of(shared.post(content=json.dumps(_with("messages.0.content.0.type", "image_url"))))
    assert error["message"].startswith("messages[0].content: image_url is not read")


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field(shared: Served, missing: str) -> None:
    error = error_of(shared.post(json={k: v for k, v in CHAT.items() if k != missing}))
    assert error["param"] == missing and error["code"] == "missing_required_parameter"


def test_two_token_limits_are_refused(shared: Served) -> None:
    assert error_of(shared.post(json={**CHAT, "max_tokens": 2, "max_completion_tokens": 3}))["param"] == "max_tokens"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'"text"', b'{"\\ud800": 1}'])
def test_body_that_is_no_json_object(shared: Served, body: bytes) -> None:
    response = shared.post(content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"user": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too many digits"),
        (b"{", "at character 1"),
    ],
)
def test_body_that_cannot_be_read_says_why(shared: Served, body: bytes, reason: str) -> None:
    error = error_of(shared.post(content=body))
    assert (error["code"], error["param"]) == ("invalid_json", None) and reason in error["message"]


def test_a_body_of_another_type_that_is_nested_too_deeply_is_no_error_of_ours(shared: Served) -> None:
    response = shared.post(content=b"[" * 100_000, headers={"content-type": "text/plain"})
    assert response.status_code in (400, 415) and error_of(response)["type"] == "invalid_request_error"


def test_form_body_says_what_to_send(shared: Served) -> None:
    response = shared.post(data={"model": "fake"})
    assert response.status_code == 400 and "application/json" in error_of(response)["message"]


def test_no_content_type_counts_as_json(shared: Served) -> None:
    assert shared.post(content=json.dumps(CHAT)).status_code == 200


def test_unknown_route_and_method(shared: Served) -> None:
    response = shared.get("/v1/images")
    assert response.status_code == 404 and "/v1/images" in error_of(response)["message"]
    response = shared.get("/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST" and error_of(response)
    assert httpx.put(shared.url + "/v1/vector_stores", timeout=20).headers["allow"] == "GET, POST"


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(chunked: bool) -> None:
    """With a client that reads nothing before it has written its whole body."""
    with serving(FakeEngine(), max_body_bytes=10_000) as served:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
        big = json.dumps({**CHAT, "user": "x" * 30_000_000}).encode()
        pieces = (big[i : i + 60_000] for i in range(0, len(big), 60_000))
        connection.request("POST", "/v1/chat/completions", pieces if chunked else big, encode_chunked=chunked)
        response = connection.getresponse()
        assert response.status == 413 and "MiB" in json.loads(response.read())["error"]["message"]
        connection.close()
        small = json.dumps({**CHAT, "user": "x" * 9_000}).encode()
        assert served.post(content=iter([small]) if chunked else small).status_code == 200
