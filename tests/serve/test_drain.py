"""A server over a real engine, in miniature, that is stopped while requests run and wait."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn

from ragjax.engine import Engine
from ragjax.serve.app import create_app
from ragjax.serve.server import Drain, Server, Watchdog
from tests.support import tiny
from tests.support.audit import audit_cache
from tests.support.pace import resting
from tests.support.serving import error_of, events_of, wait_for


@contextmanager
def served(engine: Engine) -> Iterator[tuple[str, Server, threading.Thread]]:
    """The server as the command makes it, in a thread; its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    drain = Drain()
    config = uvicorn.Config(create_app(engine, drain=drain), log_config=None, ws="none", lifespan="off", http="h11")
    with Watchdog() as watchdog:
        server = Server(config, engine, watchdog, drain)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("over", [False, True])
def test_who_runs_and_who_waits_gets_the_grace_time(over: bool) -> None:
    """Within it all streams come to their ends, those that waited included; after it they are told that it stops."""
    with tiny.engine(max_running=2) as engine:
        body = {"model": "tiny", "prompt": "The sea is", "max_tokens": 40, "stream": True}
        answers: list[httpx.Response] = []
        with served(engine) as (url, server, thread), ExitStack() as rest:
            rest.enter_context(resting(engine))
            path = f"{url}/v1/completions"
            threads = [
                threading.Thread(target=lambda: answers.append(httpx.post(path, json=body, timeout=60)))
                for _ in range(8)
            ]
            for one in threads:
                one.start()
            wait_for(lambda: engine.stats()["running"] == 2 and engine.stats()["queue_depth"] == 6)
            server.handle_exit(signal.SIGTERM, None)
            refused = httpx.post(path, json=body, timeout=60)
            assert refused.status_code == 503 and error_of(refused)["code"] == "stopping"
            began = time.monotonic()
            if over:
                server._deadline = began
            else:
                rest.close()
            for one in threads:
                one.join(60)
            thread.join(20)
            assert time.monotonic() - began < 60
        ends = [events_of(answer)[-1] if answer.status_code == 200 else answer.json() for answer in answers]
        expected = ["[DONE]"] if not over else ["stopping"]
        assert [end if end == "[DONE]" else end["error"]["code"] for end in ends] == expected * 8
        assert engine._loop.closed and not engine._loop.requests.live
        audit_cache(engine._cache, ())
