"""Streams, errors and clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import openai
import pytest

from ragjax import core
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, TEXT, Served, error_of, events_of, serving, wait_for, written
from tests.support.telling import SOURCES


def test_sse_framing(shared: Served) -> None:
    response = shared.post(json={**CHAT, "stream": True})
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["rag"]["segments"]
    assert all("usage" not in chunk and "rag" not in chunk for chunk in chunks[:-1])
    summed = events_of(shared.post(json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}))
    assert [chunk["usage"] is None for chunk in summed[:-1]] == [True] * 8 + [False] and "rag" not in summed[-2]


def test_passages_come_with_the_first_chunk_if_they_are_asked_for() -> None:
    options = {"include_sources": True, "include_usage": True}
    with serving(FakeEngine(sources=SOURCES)) as served:
        first, *chunks, last, _, _ = events_of(served.post(json={**CHAT, "stream": True, "stream_options": options}))
    assert first["choices"][0]["delta"]["role"] == "assistant" and [*first["rag"]] == ["sources"]
    assert first["rag"]["sources"] == last["rag"]["sources"] and len(last["rag"]["sources"]) == len(SOURCES)
    assert all("rag" not in chunk for chunk in chunks)


class Stepped(FakeEngine):
    """Gives a token, and each other one once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Semaphore(1)

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        async with aclosing(super().submit(request)) as events:
            async for event in events:
                while not self.going.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                yield event


def test_stream_comes_token_by_token() -> None:
    """The next token is made once the one before has arrived."""
    engine, said = Stepped(), ""
    with serving(engine) as served:
        for chunk in served.client().chat.completions.create(**CHAT, stream=True):
            if text := chunk.choices[0].delta.content:
                said += text
                engine.going.release()
    assert said == TEXT and engine.finished == 1


def test_line_ends_in_text_keep_the_framing() -> None:
    with serving(FakeEngine(tokens=("a\n\nb", "\r\n", "\u2028", "é"))) as served:
        *chunks, done = events_of(served.post(json={**CHAT, "stream": True}))
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a\n\nb\r\n\u2028é"


def test_error_before_the_stream_is_an_http_error() -> None:
    with serving(FakeEngine(error=core.RequestError("no", param="rag.knowledge"))) as served:
        response = served.post(json={**CHAT, "stream": True})
    assert response.status_code == 400 and error_of(response)["param"] == "rag.knowledge"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (core.OutOfPages("the pool is full"), 400, None),
        (core.VisibilityError("two intervals"), 400, None),
        (core.DeviceFullError("no room: lower --device-cache-gb"), 500, "device_full"),
        (core.DiskFullError("the server's disk is full: delete files"), 507, "disk_full"),
    ],
)
def test_what_the_engine_cannot_do_is_told_with_its_words(error: core.RagjaxError, status: int, code: str) -> None:
    with serving(FakeEngine(error=error)) as served:
        response = served.post(json=CHAT)
    told = error_of(response)
    assert (response.status_code, told["code"], told["message"]) == (status, code, str(error))
    assert told["type"] == ("invalid_request_error" if status == 400 else "server_error")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (core.ConfigError("/srv/index cannot be used"), 500, "internal_error"),
        (core.ClosedError("/srv"), 503, "stopping"),
    ],
)
def test_a_fault_of_the_server_is_none_of_the_clients_and_names_no_folder(
    error: core.RagjaxError, status: int, code: str
) -> None:
    with serving(FakeEngine(error=error)) as served:
        response = served.post(json=CHAT)
    assert (response.status_code, error_of(response)["code"]) == (status, code) and "/srv" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 2, "stream": True}, {"stream": True}])
def test_a_panic_of_a_library_ends_with_an_answer(fields: dict[str, Any]) -> None:
    with serving(FakeEngine(error=Panic("secret"))) as served:
        response = served.post(json={**CHAT, **fields})
        assert response.status_code == 500 and error_of(response)["code"] == "internal_error"
        assert "secret" not in response.text
    with serving(FakeEngine(breakdown=Panic("secret"))) as served:
        response = served.post(json={**CHAT, **fields, "stream": True})
        assert events_of(response)[-1]["error"]["code"] == "internal_error"


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


@pytest.mark.parametrize("proxied", [True, False])
def test_an_id_is_the_proxys_where_there_is_one(proxied: bool) -> None:
    with serving(FakeEngine(error=ValueError("secret detail")), proxied=proxied) as served:
        named, unnamed = (served.post(json=CHAT, headers=given) for given in ({"x-request-id": "its own"}, {}))
    assert ("its own" in error_of(named)["message"]) == proxied
    assert len(named.headers.get_list("x-request-id")) == (0 if proxied else 1), "the proxy adds its own"
    assert unnamed.headers["x-request-id"] in error_of(unnamed)["message"]


@pytest.mark.parametrize("delay", [0.02, 300.0], ids=["decoding", "before the first token"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_cancels_its_request(stream: bool, delay: float) -> None:
    engine = FakeEngine(tokens=("word ",) * 5000, delay=delay, context_length=6000)  # 100 seconds and more
    with serving(engine) as served:
        with served.connect() as connection:
            connection.sendall(written({**CHAT, "stream": stream, "max_tokens": 5000}))
            wait_for(lambda: engine.running == 1)
            if stream and delay < 1:
                received = b""
                while b"data: " not in received:
                    received += connection.recv(65536)
        wait_for(lambda: engine.cancelled == 1, seconds=60)
        assert engine.running == 0
        assert served.get("/health").status_code == 200
    assert engine.finished == 0
