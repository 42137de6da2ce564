"""The end of a server, after a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import httpx
import openai
import pytest

from ragjax import core
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, MESSAGES, TEXT, error_of, events_of, program, serving, url_of, wait_for


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
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.post(json={**CHAT, "stream": True})))
        asking.start()
        wait_for(lambda: engine.running == 1)
        served.stop()
        asking.join(20)
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
    assert engine.running == 0
    error = events_of(answers[0])[-1]["error"] if stream else error_of(answers[0])
    assert error["code"] == "stopping" and answers[0].status_code == (200 if stream else 503)


def test_a_stream_of_a_response_that_is_cancelled_fails() -> None:
    engine = FakeEngine(tokens=("word ",) * 1000, delay=0.02)
    body = {"model": "fake", "input": "Who?", "stream": True}
    with serving(engine, grace=1) as served:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(served.post("/v1/responses", json=body)))
        asking.start()
        wait_for(lambda: engine.running == 1)
        served.stop()
        asking.join(10)
    events = [json.loads(line.removeprefix("data: ")) for line in answers[0].text.splitlines() if line[:5] == "data:"]
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
    assert process.stderr is not None
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
    url = url_of(process)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=30))
    )
    asking.start()
    assert process.stderr is not None
    assert any("working" in line for line in process.stderr)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    log = process.stderr.read()
    assert process.wait(20) == 3 and 1 <= time.monotonic() - began < 20
    process.stderr.close()
    asking.join(30)
    assert answers[0].status_code == 503 and error_of(answers[0])["code"] == "stopping"
    assert "finished 0" in log, "the engine was closed"
    assert "a thread did not end in time" in log and "threading.py" in log, "and where each thread is"


def test_an_engine_that_does_not_close_does_not_keep_the_process() -> None:
    patch = QUICK.format(grace=0, closing=1.0) + STUCK_ENGINE
    process = program(*FLAGS, patch=patch)
    url_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    assert process.stderr is not None and "the engine did not end in time" in process.stderr.read()
    process.stderr.close()


HELD_STREAMS = """
import asyncio
from contextlib import aclosing
from pathlib import Path
plain = FakeEngine.submit
async def submit(self, request):
    async with aclosing(plain(self, request)) as events:
        async for event in events:
            yield event
            while not Path({going!r}).exists():
                await asyncio.sleep(0.01)
FakeEngine.submit = submit
"""
"""Each stream has a token, and the others once a file is there."""


@pytest.mark.slow
def test_a_stop_under_load_drains(tmp_path: Path) -> None:
    """Several streams go on to their ends; what comes meanwhile, on old and new connections, is sent elsewhere."""
    going = tmp_path / "going"
    patch = HELD_STREAMS.format(going=str(going))
    process = program("--port", "0", "--knowledge", "none", "--model", "slow", patch=patch)
    url = url_of(process)
    texts: list[str] = []
    begun = threading.Semaphore(0)

    def stream() -> None:
        client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=60)
        chunks = client.chat.completions.create(model="slow", messages=MESSAGES, stream=True)
        first = next(chunks)
        begun.release()
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in [first, *chunks]))

    threads = [threading.Thread(target=stream) for _ in range(8)]
    with httpx.Client(base_url=url, timeout=60) as kept:
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert begun.acquire(timeout=60)
        assert kept.get("/health").status_code == 200  # only now: the server closes connections that rest for seconds
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: kept.get("/health").status_code == 503)
        for refused in (kept.post("/v1/chat/completions", json=CHAT), httpx.post(f"{url}/v1/completions", json={})):
            assert refused.status_code == 503 and error_of(refused)["code"] == "stopping"
            assert int(refused.headers["retry-after"]) > 0
        assert kept.get("/metrics").status_code == 200, "it can still be watched"
        assert not texts, "all are served meanwhile"
    going.touch()
    for thread in threads:
        thread.join(60)
    assert texts == [TEXT] * 8
    assert process.stderr is not None and "finished 8" in process.stderr.read()
    assert process.wait(20) == 0
    process.stderr.close()
