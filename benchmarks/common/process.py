"""Processes that a benchmark starts and that end with it, and how a server among them is waited for."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.envs import HERE, TAIL, RivalError

START_S = 3600.0  # on a busy machine passages take long to prepare
GRACE_S = 15.0  # in which a process that is asked to end does so


@contextmanager
def running(
    command: Sequence[str | Path], environment: Mapping[str, str], log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block: politely at first. log: a file for what it says.

    From now on SIGTERM leaves this process's blocks, too: by itself it would leave the started process behind.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    words = [str(word) for word in command]
    with open(log or "/dev/null", "wb") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


def wait(
    process: subprocess.Popen[bytes],
    url: str,
    done: Callable[[Mapping[str, Any]], bool] = lambda health: True,
    *,
    pause: float = 0.05,
    limit_s: float = START_S,
    log: Path | None = None,
) -> Mapping[str, Any]:
    """Wait until a server is ready, and what it says of its health is `done`; returns that. pause: between two looks.

    Raises:
        RivalError: if it ends instead, or takes too long; with the end of its log.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/health", timeout=5)
            health: Mapping[str, Any] = answer.json() if answer.status_code == 200 else {}
            if answer.status_code == 200 and done(health):
                return health
        time.sleep(pause)
    what = "ended at its start" if process.poll() is not None else f"did not serve within {limit_s:.0f} s"
    raise RivalError(f"the server {what}" + (f":\n{log.read_text(errors='replace')[-TAIL:]}" if log else ""))
