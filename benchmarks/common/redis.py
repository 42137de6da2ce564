"""A Redis server for the length of a benchmark."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ragjax.core import ConfigError

START = 10.0
"""Seconds in which it listens."""


@contextmanager
def redis(url: str | None = None) -> Iterator[str]:
    """The address of a server: the one given, or one of its own, which keeps nothing.

    Raises:
        ConfigError: there is no redis-server to start, or it does not listen.
    """
    if url is not None:
        yield url
        return
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise ConfigError("there is no redis-server to start: install one (redis-server or valkey-server)")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    with subprocess.Popen((program, *options), stdout=subprocess.DEVNULL) as process:
        try:
            _wait(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _wait(port: int) -> None:
    end = time.monotonic() + START
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"redis-server does not listen on port {port}: {error}") from error
            time.sleep(0.1)
