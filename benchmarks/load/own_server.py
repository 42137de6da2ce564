"""ragjax's server as a process of its own: started with a cache folder, waited for, and asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import httpx

from benchmarks.common import envs
from benchmarks.common.envs import RivalError
from benchmarks.common.report import MODEL
from benchmarks.load.server import free_port

START_S = 3600.0  # on a busy machine passages take long to prepare


@contextmanager
def served(cache: Path, *flags: str) -> Iterator[tuple[Popen[bytes], str]]:
    """A server on the demo, and its URL, with this cache folder; it ends with the context."""
    port = free_port()
    command = [sys.executable, "-m", "ragjax.serve", "--port", str(port), "--model", MODEL, *flags]
    settings = {"RAGJAX_CACHE": str(cache), "PYTHONPATH": str(envs.HERE.parent)}
    with Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, env=envs.clean_environment(settings)) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait(
    process: Popen[bytes],
    url: str,
    done: Callable[[Mapping[str, Any]], bool] = lambda health: True,
    pause: float = 0.05,
    limit_s: float = START_S,
) -> Mapping[str, Any]:
    """Wait until a server is ready, and what it says of its health is `done`; returns that. pause: between two looks.

    Raises:
        RivalError: if it ends instead, or takes too long.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/health", timeout=5)
            health: Mapping[str, Any] = answer.json()
            if answer.status_code == 200 and done(health):
                return health
        time.sleep(pause)
    raise RivalError("ragjax did not serve")


def body(question: str, strategy: str | None = None, *, tokens: int = 32, stream: bool = False) -> Mapping[str, Any]:
    rag = {} if strategy is None else {"rag": {"strategy": strategy}}
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **rag}
