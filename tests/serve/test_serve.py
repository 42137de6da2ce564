"""The HTTP server over a fake engine: OpenAI's own client and raw HTTP against a real uvicorn on loopback."""

from __future__ import annotations

import http.client
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter

from ragjax import core
from ragjax.engine import Engine
from ragjax.retrieval.reader import read
from ragjax.serve import create_app, main, schema
from ragjax.serve.command import _storage, parse_options
from tests.support.fakes import FakeEngine

MESSAGES = [{"role": "user", "content": "What colour is the lighthouse?"}]
CHAT = {"model": "fake", "messages": MESSAGES}
TEXT = "The lighthouse is red."


@dataclass
class Served:
    """A running server."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def post(self, path: str = "/v1/chat/completions", **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=20, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **kwargs)

    def client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", **{"api_key": "any", "max_retries": 0, "timeout": 20, **kwargs})

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def serving(engine: FakeEngine, grace: int = 10, **kwargs: Any) -> Iterator[Served]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(engine, **kwargs), log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=grace
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
    try:
        yield served
    finally:
        served.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One server for the tests that leave nothing behind."""
    with serving(FakeEngine()) as served:
        yield served


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, checked for framing: every event is one `data:` line and an empty one."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == "" and all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


# ---------------------------------------------------------------------------- OpenAI's own client


def test_chat_with_openai_client(shared: Served) -> None:
    answer = shared.client().chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "fake"
    assert abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert choice.logprobs is None
    rag = answer.model_extra["rag"]
    assert (rag["strategy"], rag["exact_to"], rag["approximate"]) == ("prefix", "full", False)
    assert (rag["recompute_ratio"], rag["predicted"]) == (None, {"kl": 0.0, "top1": 1.0})
    assert rag["segments"][1] == {
        "id": "harbour#0",
        "title": "The harbour",
        "tokens": 4,
        "reused": 2,
        "recomputed": 1,
        "tier": None,
        "score": 0.75,
    }
    assert set(rag["timings_ms"]) == {"retrieve", "load", "prefill", "ttft", "total"}
    assert rag["notices"] == ["attention not by triton: no such kernel"]


def test_an_approximate_answer_says_so(shared: Served) -> None:
    asked = {"rag": {"strategy": "naive", "recompute_ratio": 0.5}}
    answer = shared.client().chat.completions.create(**CHAT, extra_body=asked)
    rag = answer.model_extra["rag"]
    assert (rag["exact_to"], rag["approximate"], rag["recompute_ratio"]) == (None, True, 0.5)
    assert rag["predicted"] == {"kl": 0.25, "top1": 0.75}
    assert rag["figures"] == {"focus_ideal": 0.5}


def test_chat_stream_with_openai_client(shared: Served) -> None:
    chunks = list(shared.client().chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    *said, final, usage = chunks
    assert said[0].choices[0].delta.role == "assistant" and said[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in said) == TEXT
    assert len(said) == 7, "the role, then a chunk for each token"
    assert final.choices[0].finish_reason == "stop" and final.model_extra["rag"]["strategy"] == "prefix"
    assert all(chunk.usage is None for chunk in [*said, final])
    assert usage.choices == [] and usage.usage.total_tokens == 11
    assert usage.usage.prompt_tokens_details.cached_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_logprobs(shared: Served) -> None:
    client = shared.client()
    content = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(token.token for token in content) == TEXT
    assert content[1].bytes == list(b" light") and content[1].logprob == -0.25
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("The", -0.25), ("other", -9999.0)]
    assert client.chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    stream = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, stream=True)
    streamed = [t.token for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert "".join(streamed) == TEXT


def test_piece_of_a_character_has_no_bytes() -> None:
    with serving(FakeEngine(tokens=("\ufffd", "é"))) as served:
        content = served.client().chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs.content
    assert content[0].bytes is None and content[1].bytes == [0xC3, 0xA9]


def test_completion_with_openai_client(shared: Served) -> None:
    client = shared.client()
    answer = client.completions.create(model="fake", prompt="The lighthouse", max_tokens=4, logprobs=2)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("The lighthouse is", "length")
    assert choice.logprobs.tokens == ["The", " light", "house", " is"]
    assert choice.logprobs.text_offset == [0, 3, 9, 14]
    assert choice.logprobs.token_logprobs == [-0.25] * 4
    assert choice.logprobs.top_logprobs[0] == {"The": -0.25, "other": -9999.0}
    assert answer.usage.prompt_tokens_details.cached_tokens == 7 and answer.model_extra["rag"]["strategy"] == "prefix"


def test_completion_stream(shared: Served) -> None:
    chunks = list(shared.client().completions.create(model="fake", prompt=["a b"], stream=True, logprobs=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 6 + ["stop"]
    assert [c.choices[0].logprobs.text_offset for c in chunks[:-1]] == [[0], [3], [9], [14], [17], [21]]
    assert chunks[-1].model_extra["rag"]["exact_to"] == "full"


def test_models(shared: Served) -> None:
    client = shared.client()
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "ragjax")
    rag = model.model_extra["rag"]
    assert rag["strategies"] == ["full", "prefix", "naive"] and rag["graphs"] == ["facts"]
    assert (rag["default_strategy"], rag["default_recompute_ratio"]) == ("prefix", None)
    assert client.models.retrieve("fake").model_extra["context_length"] == 64
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_model_name_with_slash() -> None:
    with serving(FakeEngine(model_name="org/model")) as served:
        assert served.client().models.retrieve("org/model").id == "org/model"


def test_openai_error_classes(shared: Served) -> None:
    client = shared.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as strategy:
        client.chat.completions.create(**CHAT, extra_body={"rag": {"strategy": "magic"}})
    assert strategy.value.param == "rag.strategy" and "prefix" in strategy.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**CHAT, max_tokens=100)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(**CHAT, temperature=3)
    assert hot.value.param == "temperature"


def test_overload_is_429_with_retry_after() -> None:
    with serving(FakeEngine(max_queue=0)) as served:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as full:
                served.client().chat.completions.create(**CHAT, stream=stream)
            assert int(full.value.response.headers["retry-after"]) >= 1


def test_closed_engine_is_503() -> None:
    with serving(FakeEngine(error=core.ClosedError("the engine is closed"))) as served:
        gone = served.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES})
        assert gone.status_code == 503 and gone.json()["error"]["code"] == "stopping"
        assert int(gone.headers["retry-after"]) >= 1


# -------------------------------------------------------------------------- what reaches the engine


@dataclass
class Caught:
    """A server and its engine, to read what a body became."""

    served: Served
    engine: FakeEngine

    def request(self, path: str = "/v1/chat/completions", **fields: Any) -> core.Request:
        body = {"model": "fake", **({"messages": MESSAGES} if "chat" in path else {}), **fields}
        response = self.served.post(path, json=body)
        assert response.status_code == 200, response.text
        return self.engine.requests[-1]


@pytest.fixture(scope="module")
def caught() -> Iterator[Caught]:
    engine = FakeEngine(context_length=10**6)
    with serving(engine) as served:
        yield Caught(served, engine)


def test_defaults_reach_engine(caught: Caught) -> None:
    request = caught.request()
    assert request == core.Request(messages=(core.Message("user", MESSAGES[0]["content"]),))


def test_sampling_reaches_engine(caught: Caught) -> None:
    request = caught.request(
        max_completion_tokens=3,
        temperature=1,
        top_p=0.5,
        top_k=4,
        seed=7,
        stop="\n",
        logprobs=True,
        top_logprobs=5,
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0,
        response_format={"type": "text"},
        user="someone",
    )
    assert request.sampling == core.Sampling(3, 1.0, 0.5, 4, 7, ("\n",), 5)


def test_nulls_count_as_absent(caught: Caught) -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "response_format")
    assert caught.request(**dict.fromkeys(fields)) == caught.request()
    usage = {"stream": True, "stream_options": {"include_usage": None}}
    assert caught.request(**usage) == caught.request()
    inline = {"id": "x", "text": "words"}
    rag = {"knowledge": None, "top_k": None, "strategy": None, "recompute_ratio": None, "graph": None}
    untitled = caught.request(rag={"documents": [{**inline, "title": None}], **rag})
    assert untitled == caught.request(rag={"documents": [inline]})
    graph = dict.fromkeys(("name", "entities", "relation_paths", "hops", "paths", "serialization"))
    assert caught.request(rag={"graph": graph}).rag == core.Rag(graph=core.Graph())


def test_every_field_that_may_be_left_out_takes_null() -> None:
    bodies = [body for body in vars(schema).values() if isinstance(body, type) and issubclass(body, schema._Body)]
    fields = [(body, name, field) for body in bodies for name, field in body.model_fields.items()]
    assert len(fields) > 40
    for body, name, field in fields:
        if not field.is_required():
            assert TypeAdapter(field.rebuild_annotation()).validate_python(None) is None, (body, name)


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
    given = {"relation_paths": [["A", "r", "B"]], "serialization": "triplet"}
    expected_graph = core.Graph(relation_paths=(("A", "r", "B"),), serialization="triplet")
    assert caught.request(rag={"graph": given}).rag == core.Rag(graph=expected_graph)
    sought = {"name": "g", "hops": 3, "paths": 5}
    assert caught.request(rag={"graph": sought}).rag == core.Rag(graph=core.Graph("g", hops=3, paths=5))
    assert caught.request(rag={"graph": {"entities": ["A"]}}).rag == core.Rag(graph=core.Graph(entities=("A",)))
    assert caught.request(rag=None).rag is None
    assert caught.request(rag={}).rag == core.Rag()


def test_completion_reaches_engine(caught: Caught) -> None:
    rag = {"strategy": "full", "recompute_ratio": 1}
    request = caught.request("/v1/completions", prompt="a", logprobs=3, echo=False, best_of=1, rag=rag)
    expected = core.Rag(top_k=0, strategy="full", recompute_ratio=1.0)
    assert request == core.Request(prompt="a", sampling=core.Sampling(logprobs=3), rag=expected)


# --------------------------------------------------------------------------------------- bad input


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
        ("tools", "tools"),
        ("rag.frobnicate", "rag.frobnicate"),
        ("rag.documents.0.frobnicate", "rag.documents[0].frobnicate"),
        ("messages.0.name", "messages[0].name"),
        ("messages.0.content.0.frobnicate", "messages[0].content[0].frobnicate"),
        ("stream_options.frobnicate", "stream_options.frobnicate"),
    ],
)
def test_unknown_field_at_each_level(shared: Served, path: str, param: str) -> None:
    assert shared.post(json=_with("stream", True)).status_code == 200, "the body is sound without the field"
    response = shared.post(content=json.dumps(_with(path, 1)))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["code"] == "unknown_parameter" and param in error["message"]


@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "Hi", "messages"),
        ("messages.0.role", "tool", "messages[0].role"),
        ("messages.0.content", None, "messages[0].content"),
        ("messages.0.content", "\ud800", "messages[0].content[0].text"),
        ("messages.0.content.0.type", "image_url", "messages[0].content[0].type"),
        ("n", 2, "n"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", "12", "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("temperature", float("nan"), "temperature"),
        ("temperature", -1, "temperature"),
        ("top_p", 0, "top_p"),
        ("seed", 2**70, "seed"),
        ("seed", -1, "seed"),
        ("stop", ["a"] * 5, "stop"),
        ("stop", [1], "stop[0]"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", -1, "frequency_penalty"),
        ("response_format", {"type": "json_object"}, "response_format.type"),
        ("response_format", {"type": "text", "x": 1}, "response_format.x"),
        ("response_format", {}, "response_format.type"),
        ("n", True, "n"),
        ("n", 1.0, "n"),
        ("presence_penalty", False, "presence_penalty"),
        ("stream", False, "stream_options"),
        ("rag.top_k", -1, "rag.top_k"),
        ("rag.recompute_ratio", 1.5, "rag.recompute_ratio"),
        ("rag.recompute_ratio", "0.2", "rag.recompute_ratio"),
        ("rag.recompute_ratio", True, "rag.recompute_ratio"),
        ("rag.documents.0.text", 5, "rag.documents[0].text"),
        ("rag.documents.0.id", "", "rag.documents[0].id"),
        ("rag.documents", [5], "rag.documents[0]"),
        ("rag", "demo", "rag"),
        ("rag", {"graph": 5}, "rag.graph"),
        ("rag", {"graph": {"hops": 0}}, "rag.graph.hops"),
        ("rag", {"graph": {"serialization": "prose"}}, "rag.graph.serialization"),
        ("rag", {"graph": {"relation_paths": [["A", ""]]}}, "rag.graph.relation_paths[0][1]"),
        ("rag", {"graph": "facts", "top_k": 2}, "rag.graph"),
        ("rag", {"documents": ["a"], "top_k": 1}, "rag.top_k"),
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
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "echo": 0}, "echo"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": True}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "rag": {"top_k": 2}}, "rag.top_k"),
        ({"prompt": "a", "rag": {"recompute_ratio": -0.1}}, "rag.recompute_ratio"),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
    ],
)
def test_bad_completion_names_its_field(shared: Served, fields: dict[str, Any], param: str) -> None:
    response = shared.post("/v1/completions", json={"model": "fake", **fields})
    assert response.status_code == 400 and error_of(response)["param"] == param


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_field(shared: Served, missing: str) -> None:
    error = error_of(shared.post(json={k: v for k, v in CHAT.items() if k != missing}))
    assert error["param"] == missing and error["code"] == "missing_required_parameter"


def test_two_token_limits_are_refused(shared: Served) -> None:
    assert error_of(shared.post(json={**CHAT, "max_tokens": 2, "max_completion_tokens": 3}))["param"] == "max_tokens"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{", b"[" * 100_000, b'{"\\ud800": 1}']
)
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


def test_form_body_says_what_to_send(shared: Served) -> None:
    response = shared.post(data={"model": "fake"})
    assert response.status_code == 400 and "application/json" in error_of(response)["message"]


def test_no_content_type_counts_as_json(shared: Served) -> None:
    assert shared.post(content=json.dumps(CHAT)).status_code == 200


def test_unknown_route_and_method(shared: Served) -> None:
    response = shared.get("/v1/embeddings")
    assert response.status_code == 404 and "/v1/embeddings" in error_of(response)["message"]
    response = shared.get("/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST" and error_of(response)


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


# -------------------------------------------------------------------------------- streams and ends


def test_sse_framing(shared: Served) -> None:
    response = shared.post(json={**CHAT, "stream": True})
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["rag"]["segments"]
    assert all("usage" not in chunk and "rag" not in chunk for chunk in chunks[:-1])
    summed = events_of(shared.post(json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] is None for chunk in summed[:-1]] == [True] * 8 + [False] and "rag" not in summed[-2]


def test_stream_comes_token_by_token() -> None:
    with serving(FakeEngine(delay=0.05)) as served:
        times = []
        for _ in served.client().chat.completions.create(**CHAT, stream=True):
            times.append(time.monotonic())
    assert times[-1] - times[0] > 0.15, "chunks were held back until the end"


def test_line_ends_in_text_keep_the_framing() -> None:
    with serving(FakeEngine(tokens=("a\n\nb", "\r\n", "\u2028", "é"))) as served:
        *chunks, done = events_of(served.post(json={**CHAT, "stream": True}))
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a\n\nb\r\n\u2028é"


def test_error_before_the_stream_is_an_http_error() -> None:
    with serving(FakeEngine(error=core.RequestError("no", param="rag.knowledge"))) as served:
        response = served.post(json={**CHAT, "stream": True})
    assert response.status_code == 400 and error_of(response)["param"] == "rag.knowledge"


@pytest.mark.parametrize("error", [core.OutOfPages("the pool is full"), core.VisibilityError("two intervals")])
def test_what_the_engine_cannot_do_is_a_400_with_its_words(error: core.RagjaxError) -> None:
    with serving(FakeEngine(error=error)) as served:
        response = served.post(json=CHAT)
    assert response.status_code == 400 and error_of(response)["message"] == str(error)


def test_error_in_mid_stream_is_an_event() -> None:
    with serving(FakeEngine(breakdown=ValueError("secret detail"))) as served:
        response = served.post(json={**CHAT, "stream": True})
        *chunks, last = events_of(response)
        assert len(chunks) == 3 and last["error"]["code"] == "internal_error" and "secret" not in response.text
        with pytest.raises(openai.APIError):
            list(served.client().chat.completions.create(**CHAT, stream=True))


def test_engine_failure_leaks_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(FakeEngine(error=ValueError("secret detail"))) as served:
        response = served.post(json=CHAT)
        assert served.get("/health").status_code == 200, "the server goes on"
    assert response.status_code == 500 and "secret" not in response.text
    request_id = response.headers["x-request-id"]
    assert request_id in error_of(response)["message"]
    (record,) = [r for r in caplog.records if request_id in r.getMessage() and r.exc_info]
    assert "secret detail" in str(record.exc_info)


@pytest.mark.parametrize("delay", [0.02, 30.0], ids=["decoding", "before the first token"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_cancels_its_request(stream: bool, delay: float) -> None:
    engine = FakeEngine(tokens=("word ",) * 1000, delay=delay, context_length=2000)
    with serving(engine) as served:
        with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as connection:
            body = json.dumps({**CHAT, "stream": stream, "max_tokens": 1000}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            wait_for(lambda: engine.running == 1)
            if stream and delay < 1:
                received = b""
                while b"data: " not in received:
                    received += connection.recv(65536)
        wait_for(lambda: engine.cancelled == 1, seconds=2)
        engine.audit()
        assert served.get("/health").status_code == 200
    assert engine.finished == 0


# ------------------------------------------------------------------------------------------ access


def test_key_is_required_except_for_health() -> None:
    with serving(FakeEngine(), keys={"sésame": ""}) as served:
        assert served.get("/health").json() == {"status": "ok", "ready": True, "model": "fake"}
        for path in ("/metrics", "/v1/models", "/nowhere", "/openapi.json"):
            response = served.get(path)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
        for wrong in ("sésam", "sésames", "SÉSAME"):
            headers = {"authorization": f"Bearer {wrong}".encode()}
            assert served.post(json=CHAT, headers=headers).status_code == 401
        assert served.post(json=CHAT, headers={"authorization": "sésame".encode()}).status_code == 401
        assert served.post(json=CHAT, headers={"authorization": "Bearer sésame".encode()}).status_code == 200


def test_key_with_openai_client() -> None:
    with serving(FakeEngine(), keys={"sesame": ""}) as served:
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="wrong").models.list()
        assert served.client(api_key="sesame").models.list().data[0].id == "fake"


# ----------------------------------------------------------------------------------------- metrics


def _families(served: Served) -> list[Metric]:
    response = served.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return list(text_string_to_metric_families(response.text))


def _samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = _families(served)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_metrics() -> None:
    with serving(FakeEngine()) as served:
        served.post(json=CHAT)
        served.post(json={**CHAT, "stream": True, "rag": {"strategy": "naive"}})
        served.post(json={**CHAT, "frobnicate": 1})
        served.get("/nowhere/1")
        served.get("/nowhere/2")
        samples = _samples(served)
    chat = ("route", "/v1/chat/completions")
    assert all(name.startswith("ragjax_") for name, _ in samples)
    assert samples["ragjax_requests_total", (("strategy", "prefix"),)] == 1
    assert samples["ragjax_requests_total", (("strategy", "naive"),)] == 1
    assert samples["ragjax_reused_tokens_total", ()] == 14
    assert samples["ragjax_pages_capacity", ()] == 128
    assert samples["ragjax_attention_calls_total", (("backend", "xla"),)] == 60
    assert samples["ragjax_attention_fallbacks_total", (("reason", "triton: no such kernel"),)] == 60
    assert samples["ragjax_http_requests_total", (chat, ("status", "200"))] == 2
    assert samples["ragjax_http_requests_total", (chat, ("status", "400"))] == 1
    assert samples["ragjax_http_requests_total", (("route", "unknown"), ("status", "404"))] == 2
    assert samples["ragjax_http_request_seconds_count", (chat,)] == 3
    assert samples["ragjax_ttft_seconds_count", (("strategy", "naive"),)] == 1
    assert samples["ragjax_inter_token_seconds_count", ()] == 10, "five gaps between six tokens, twice"


def test_every_engine_number_is_exposed() -> None:
    engine = FakeEngine()
    with serving(engine) as served:
        served.post(json=CHAT)
        names = {name for name, _ in _samples(served)}
    renamed = {"pages_total": "pages_capacity"}
    assert {f"ragjax_{renamed.get(name, name)}" for name in engine.stats()} <= names


def test_the_page_names_every_metric_and_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    engine = FakeEngine()
    with serving(engine) as served:
        names = {f.name + "_total" * (f.type == "counter") for f in _families(served)}
    rows = "\n".join(line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"ragjax_\w+", rows)) == {name for name in names if not name.endswith("_created")}
    flags = {f"--{name.replace('_', '-')}" for name in vars(parse_options([]))}
    assert set(re.findall(r"--[\w-]+", rows)) == flags


def test_the_page_names_every_endpoint() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    paths = {route.path.replace(":path", "") for route in create_app(FakeEngine()).routes}  # type: ignore[attr-defined]
    assert set(re.findall(r"`(?:GET|POST) (/[^`]*)`", page)) == paths


def test_what_shadow_replay_sees_is_a_histogram() -> None:
    engine = FakeEngine()
    with serving(engine) as served:
        (observe,) = engine.observers
        observe("naive", core.Divergence(0.02, 0.75))
        observe("naive", core.Divergence(0.5, 1.0))
        samples = _samples(served)
    naive = ("strategy", "naive")
    assert samples["ragjax_shadow_kl_sum", (naive,)] == pytest.approx(0.52)
    assert samples["ragjax_shadow_kl_bucket", (("le", "0.03"), naive)] == 1
    assert samples["ragjax_shadow_top1_count", (naive,)] == 2
    assert samples["ragjax_shadow_top1_bucket", (("le", "0.8"), naive)] == 1
    assert samples["ragjax_shadow_replays_total", (("outcome", "replayed"),)] == 1
    assert samples["ragjax_shadow_escalations_total", (("reason", "fault"),)] == 0


def test_two_apps_count_apart() -> None:
    with serving(FakeEngine()) as one, serving(FakeEngine()) as other:
        one.post(json=CHAT)
        assert not any(("route", "/v1/chat/completions") in labels for _, labels in _samples(other))


# -------------------------------------------------------------------------------------- stop, flags


def test_graceful_stop_finishes_the_running_request() -> None:
    engine = FakeEngine(delay=0.1)
    with serving(engine) as served:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.post(json={**CHAT, "stream": True})))
        asking.start()
        wait_for(lambda: engine.running == 1)
        served.stop()
        asking.join(10)
    assert events_of(answers[0])[-1] == "[DONE]" and engine.finished == 1


@pytest.mark.parametrize("stream", [True, False])
def test_stop_cancels_after_the_grace_time(stream: bool) -> None:
    engine = FakeEngine(tokens=("word ",) * 1000, delay=0.02)
    with serving(engine, grace=1) as served:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.post(json={**CHAT, "stream": stream})))
        asking.start()
        wait_for(lambda: engine.running == 1)
        served.stop()
        asking.join(10)
    assert engine.cancelled == 1
    engine.audit()
    error = events_of(answers[0])[-1]["error"] if stream else error_of(answers[0])
    assert error["code"] == "stopping" and answers[0].status_code == (200 if stream else 503)


PROGRAM = """
import sys, types
sys.path.insert(0, {tests!r})
from tests.support.fakes import FakeEngine
from prometheus_client import Metric
module = types.ModuleType("ragjax.engine")
module.Engine = FakeEngine
sys.modules["ragjax.engine"] = module
from ragjax import serve
close = FakeEngine.close
FakeEngine.close = lambda self: (close(self), print("finished", self.finished, file=sys.stderr))
sys.exit(serve.main(sys.argv[1:]))
"""


def _program(*flags: str) -> subprocess.Popen[str]:
    """The command, with the fake in the engine's place."""
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]))
    environment = {k: v for k, v in os.environ.items() if k != "RAGJAX_API_KEY"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_gracefully(number: signal.Signals) -> None:
    process = _program("--model", "slow", "--port", "0", "--api-key", "k", "--knowledge", "none")
    assert process.stderr is not None
    ready = next(line for line in process.stderr if "ready at" in line)
    url = re.search(r"http://\S+/v1", ready)
    assert url is not None
    client = openai.OpenAI(base_url=url[0], api_key="k", max_retries=0, timeout=20)
    stream = client.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
    first = next(stream)
    process.send_signal(number)
    rest = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [first, *rest])
    log = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 0 and text == TEXT
    assert "finished 1" in log and "Traceback" not in log


def test_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: dict[str, Any] = {}

    class Recorder:
        @staticmethod
        def load(model: str, **settings: Any) -> None:
            loaded.update(settings, model=model)
            raise core.ConfigError("seen enough")

    monkeypatch.setattr("ragjax.engine.Engine", Recorder)
    expected = {
        "model": "some/model",
        "strategy": "naive",
        "recompute_ratio": 0.25,
        "quality_budget": "KL=0.05",
        "quality_fallback": "full",
        "shadow_rate": 0.125,
        "dtype": "float32",
        "top_k": 5,
        "device_cache_gb": 0.25,
        "max_queue": 7,
        "max_context": 512,
        "index": "hnsw",
        "index_dir": str(tmp_path / "kept"),
        "record_trace": str(tmp_path / "trace"),
        "graph_dir": str(tmp_path / "graphs"),
    }
    flags = [part for name, value in expected.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    facts = tmp_path / "facts.tsv"
    facts.write_text("a\tb\tc\n")
    assert main([*flags, "--graph", str(facts), "--knowledge", "none", "--port", "0"]) == 2
    assert loaded == {**expected, "graph": {"facts": facts}, "knowledge": None, "storage": core.StorageOptions()}


def test_flags_and_fake_agree_with_the_engine() -> None:
    settings = inspect.signature(Engine.load).parameters
    options = vars(parse_options([]))
    shared = {name for name in settings if name in options} - {"model", "knowledge"}
    assert {"device_cache_gb", "index_dir", "top_k"} < shared
    assert {name: options[name] for name in shared} == {name: settings[name].default for name in shared}
    fake = inspect.signature(FakeEngine.load).parameters
    assert {n: p.default for n, p in fake.items()} == {n: settings[n].default for n in fake}


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--frobnicate", "1"], "--frobnicate"),
        (["--recompute-ratio", "1.2"], "--recompute-ratio"),
        (["--shadow-rate", "-1"], "--shadow-rate"),
        (["--quality-fallback", "prefix"], "--quality-fallback"),
        (["--mod", "x"], "--mod"),
        (["--port", "http"], "--port"),
        (["--port", "70000"], "--port"),
        (["--dtype", "int4"], "--dtype"),
        (["--top-k", "0"], "--top-k"),
        (["--device-cache-gb", "nan"], "--device-cache-gb"),
        (["--device-cache-gb", "1e305"], "--device-cache-gb"),
        (["--host-cache-gb", "1e305"], "--host-cache-gb"),
        (["--max-body-mb", "-1"], "--max-body-mb"),
        (["--index", "tree"], "--index"),
        (["--knowledge", "/no/such/folder"], "/no/such/folder"),
        (["--graph", "/no/such/facts.tsv"], "--graph"),
        (["--api-key", ""], "API key"),
        (["--api-key", "key "], "--api-key"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--port"], "--port"),
        (["extra"], "extra"),
    ],
)
def test_bad_flag_is_one_line_and_code_2(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err


def test_bad_model_is_one_line_and_code_2() -> None:
    process = _program("--model", "missing", "--port", "0")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2 and err.count("\n") == 1 and "'missing'" in err


def test_occupied_port_is_one_line_and_code_2(shared: Served, capsys: pytest.CaptureFixture[str]) -> None:
    port = shared.url.rsplit(":", 1)[1]
    assert main(["--port", port]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and port in err


def test_port_taken_while_the_model_loads_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        class Loads(FakeEngine):
            @classmethod
            def load(cls, model: str, **settings: Any) -> FakeEngine:
                other.listen()
                return FakeEngine()

        monkeypatch.setattr("ragjax.engine.Engine", Loads)
        port = str(other.getsockname()[1])
        assert main(["--port", port]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and port in err


def test_storage_flags_reach_the_engine(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"k1": {"name": "acme", "quota_gb": 0.5}, "k2": {"name": "umbra"}}))
    flags = ["--host-cache-gb", "2", "--disk-cache", str(tmp_path), "--disk-cache-gb", "3", "--at-rest", "int8"]
    more = ["--load-timeout", "4", "--policy", "lacr", "--share-knowledge", "--tenants", str(tenants)]
    options = parse_options([*flags, *more])
    assert _storage(options) == core.StorageOptions(
        policy="lacr",
        host_gb=2.0,
        disk=str(tmp_path),
        disk_gb=3.0,
        at_rest="int8",
        load_timeout=4.0,
        quotas={"acme": 0.5},
        share_knowledge=True,
    )
    assert _storage(parse_options([])) == core.StorageOptions()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "cannot read"),
        ("[]", "object"),
        ("{}", "object"),
        ('{"k": {"name": ""}}', "needs a name"),
        ('{"k": {"name": "a", "quota": 1}}', "no more"),
        ('{"k": {"name": "a", "quota_gb": -1}}', "above 0"),
        ('{"k": {"name": "a"}, "l": {"name": "a"}}', "same name"),
        ('{" ": {"name": "a"}}', "empty"),
        ('{"k": {"name": "a"}, "k": {"name": "b"}}', "twice"),
        ('{"k": {"name": "a", "name": "b"}}', "twice"),
        ('{"k": {"name": "\\ud800"}}', "Unicode"),
        ('{"k": {"name": "a", "quota_gb": true}}', "above 0"),
        ('{"k": {"name": "a", "quota_gb": 1e305}}', "up to 1e9"),
        ('{"\\ud800": {"name": "a"}}', "printable"),
        ('{"k\\n": {"name": "a"}}', "printable"),
        ('{"a\\tb": {"name": "a"}}', "printable"),
        ('{"shared": {"name": "a"}}', "--api-key"),
    ],
)
def test_bad_tenant_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(content)
    with pytest.raises(core.ConfigError, match=message):
        parse_options(["--tenants", str(path), "--api-key", "shared"])


def test_the_key_decides_the_tenant() -> None:
    engine = FakeEngine()
    with serving(engine, keys={"master": "", "k1": "acme", "k2": "umbra"}) as served:
        for key in ("k1", "k2", "master"):
            assert served.post(json=CHAT, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert served.post(json=CHAT, headers={"authorization": "Bearer acme"}).status_code == 401
    assert [request.tenant for request in engine.requests] == ["acme", "umbra", ""]


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAGJAX_API_KEY", raising=False)
    plain = parse_options([])
    assert (plain.host, plain.port, plain.api_key) == ("127.0.0.1", 8000, None)
    assert plain.knowledge is not None and list(plain.knowledge) == ["demo"]
    assert len(list(Path(plain.knowledge["demo"]).glob("*.md"))) >= 40, "the packaged documents"
    assert parse_options(["--knowledge", "none"]).knowledge is None
    assert parse_options(["--knowledge", str(tmp_path)]).knowledge == {tmp_path.name: tmp_path}
    assert plain.graph is None
    graph = parse_options(["--graph", "demo"]).graph
    assert list(graph) == ["demo"] and len(list(read(graph["demo"]))) >= 180, "the packaged facts"
    facts = tmp_path / "facts.tsv"
    facts.write_text("a\tb\tc\n")
    assert parse_options(["--graph", str(facts)]).graph == {"facts": facts}
    monkeypatch.setenv("RAGJAX_API_KEY", "from the environment")
    assert parse_options([]).api_key == "from the environment"
    assert parse_options(["--api-key", "flag"]).api_key == "flag"
    monkeypatch.setenv("RAGJAX_API_KEY", "from a file\n")
    with pytest.raises(core.ConfigError, match="RAGJAX_API_KEY"):
        parse_options([])
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    with pytest.raises(core.ConfigError, match="empty"):
        parse_options([])
