"""A server over a fake engine: in this process, on loopback, or as a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from ragjax import core
from ragjax.serve.app import create_app
from ragjax.serve.server import Limits, limited
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
    clients: list[openai.OpenAI] = field(default_factory=list)

    def post(self, path: str = "/v1/chat/completions", **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=20, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **kwargs)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=20)

    def client(self, **kwargs: Any) -> openai.OpenAI:
        """A client that is closed when the server stops."""
        given = {"api_key": "any", "max_retries": 0, "timeout": 20, **kwargs}
        self.clients.append(openai.OpenAI(base_url=self.url + "/v1", **given))
        return self.clients[-1]

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def serving(engine: FakeEngine, grace: int = 10, limits: Limits | None = None, **kwargs: Any) -> Iterator[Served]:
    limits = limits or Limits()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = create_app(engine, timeout=limits.timeout, **kwargs)
    config = uvicorn.Config(
        app,
        log_config=None,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=grace,
        http=limited(limits, app.state.metrics.count_ended),
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


def written(body: Any, path: str = "/v1/chat/completions") -> bytes:
    """A request as it goes over a connection."""
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(content), content)


def typed_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream whose events have types, checked for framing."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, rest = response.text.split("\n\n")
    parts = [block.removeprefix("event: ").split("\ndata: ") for block in blocks]
    events = [json.loads(data) for _, data in parts]
    assert rest == "" and [event["type"] for event in events] == [name for name, _ in parts]
    return events


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


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


PROGRAM = """
import sys, types
sys.path.insert(0, {tests!r})
from tests.support.fakes import FakeEngine
from prometheus_client import Metric
module = types.ModuleType("ragjax.engine")
module.Engine = FakeEngine
sys.modules["ragjax.engine"] = module
close = FakeEngine.close
FakeEngine.close = lambda self: (close(self), print("finished", self.finished, file=sys.stderr))
{patch}
from ragjax.serve.command import main
sys.exit(main(sys.argv[1:]))
"""


def program(*flags: str, patch: str = "") -> subprocess.Popen[str]:
    """The command, with the fake in the engine's place. patch: statements that run before it."""
    program = PROGRAM.format(tests=str(Path(__file__).parents[2]), patch=patch)
    environment = {k: v for k, v in os.environ.items() if k != "RAGJAX_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    timer = threading.Timer(120, process.kill)  # one that does not end fails its test
    timer.daemon = True
    timer.start()
    return process


def url_of(process: subprocess.Popen[str]) -> str:
    """Waits until the program is ready; the base of its URLs."""
    assert process.stderr is not None
    ready = next(line for line in process.stderr if "ready at" in line)
    url = re.search(r"(http://\S+)/v1", ready)
    assert url is not None
    return url[1]
