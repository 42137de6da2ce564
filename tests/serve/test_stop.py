"""The end of a server, after a signal."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from httpx import Response

from ragjax import core
from ragjax.serve.server import Drain
from tests.support.fakes import FakeEngine
from tests.support.serving import (
    CHAT,
    MESSAGES,
    TEXT,
    Served,
    error_of,
    events_of,
    program,
    serving,
    typed_of,
    url_of,
    wait_for,
)


def answer_of_a_stopped(
    engine: FakeEngine, served: Served, path: str = "/v1/chat/completions", **body: Any
) -> Response:
    """The answer to a request that runs when the server is told to stop."""
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(served.post, path, json=body)
        wait_for(lambda: engine.running == 1)
        served.stop()
        return asked.result(20)


def test_graceful_stop_finishes_the_running_request() -> None:
    class Held(FakeEngine):
        """Says nothing before the server was told to stop."""

        async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
            async with aclosing(super().submit(request)) as events:
                async for event in events:
                    while not served.server.should_exit:
                        await asyncio.sleep(0.005)
                    yield event

    engine = Held()
    with serving(engine) as served:
        answer = answer_of_a_stopped(engine, served, **CHAT, stream=True)
    assert events_of(answer)[-1] == "[DONE]" and engine.finished == 1


@pytest.mark.parametrize("stream", [True, False])
def test_stop_cancels_after_the_grace_time(stream: bool) -> None:
    engine = FakeEngine(tokens=("word ",) * 1000, delay=0.02)
    with serving(engine, grace=1) as served:
        answer = answer_of_a_stopped(engine, served, **CHAT, stream=stream)
    assert (engine.cancelled, engine.running) == (1, 0)
    error = events_of(answer)[-1]["error"] if stream else error_of(answer)
    assert error["code"] == "stopping" and answer.status_code == (200 if stream else 503)


def test_a_stream_of_a_response_that_is_cancelled_fails() -> None:
    engine = FakeEngine(tokens=("word ",) * 1000, delay=0.02)
    with serving(engine, grace=1) as served:
        answer = answer_of_a_stopped(engine, served, "/v1/responses", model="fake", input="Who?", stream=True)
    events = typed_of(answer)
    failed = events[-1]
    assert failed["type"] == "response.failed" and "is stopping" in failed["response"]["error"]["message"]
    assert failed["sequence_number"] == len(events) - 1 and engine.cancelled == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_gracefully(number: signal.Signals) -> None:
    process = program("--model", "slow", "--port", "0", "--api-key", "k", "--knowledge", "none")
    client = openai.OpenAI(base_url=url_of(process) + "/v1", api_key="k", max_retries=0, timeout=20)
    stream = client.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
    first = next(stream)
    process.send_signal(number)
    rest = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [first, *rest])
    log = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 0 and text == TEXT
    assert "finished 1" in log and "Traceback" not in log


FLAGS = ("--port", "0", "--knowledge", "none", "--model", "fake")
QUICK = """from ragjax.serve import server; server.GRACE, server.CLOSING, server.LAST = {grace}, {closing}, 0.5
import asyncio, threading
"""
STUCK_THREAD = """
async def submit(self, request):
    print("working", file=sys.stderr)
    await asyncio.to_thread(threading.Event().wait)
    yield
FakeEngine.submit = submit
"""
STUCK_ENGINE = "FakeEngine.close = lambda self: threading.Event().wait()"


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    patch = QUICK.format(grace=1, closing=30.0) + STUCK_THREAD  # closing takes none of it
    process = program(*FLAGS, patch=patch)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(httpx.post, f"{url_of(process)}/v1/chat/completions", json=CHAT, timeout=30)
        assert any("working" in line for line in process.stderr)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert process.wait(20) == 3 and 1 <= time.monotonic() - began < 20
        process.stderr.close()
        answer = asked.result(30)
    assert answer.status_code == 503 and error_of(answer)["code"] == "stopping"
    assert "finished 0" in log, "the engine was closed"
    assert "a thread did not end in time" in log and "threading.py" in log, "and where each thread is"


def test_an_engine_that_does_not_close_does_not_keep_the_process() -> None:
    patch = QUICK.format(grace=0, closing=1.0) + STUCK_ENGINE
    process = program(*FLAGS, patch=patch)
    url_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    assert "the engine did not end in time" in process.stderr.read()
    process.stderr.close()


def test_what_comes_while_a_server_stops_is_sent_elsewhere() -> None:
    """Of what it serves meanwhile `test_drain.py` tells."""
    with serving(FakeEngine(), drain=Drain(stopping=True)) as served:
        for refused in (served.get("/health"), served.post(json=CHAT)):
            assert refused.status_code == 503 and error_of(refused)["code"] == "stopping"
            assert int(refused.headers["retry-after"]) > 0
        assert served.get("/metrics").status_code == 200, "it can still be watched"
