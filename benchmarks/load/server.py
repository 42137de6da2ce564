"""Servers under load: a process of its own that streams over HTTP, and the client's side of it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import envs
from benchmarks.common.envs import RivalError
from benchmarks.load.client import Delivery
from benchmarks.load.workload import Ask

Body = Mapping[str, Any]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


class Server(ABC):
    """A process that answers on a port.

    health: path that answers 200 once the server can serve. path: where requests are posted. start_seconds: a server
    that does not serve by then has failed. stop_seconds: what it gets to end by itself.
    """

    health = "/health"
    path = "/"
    start_seconds = 300.0
    stop_seconds = 15.0

    def __init__(self, name: str):
        self.name = name
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._words = Path()

    @abstractmethod
    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        """The command line that serves on a port, and environment variables besides."""

    @abstractmethod
    def body(self, ask: Ask) -> Body:
        """What is posted."""

    @abstractmethod
    def delivery(self, event: Body) -> Delivery | None:
        """What an event of the stream says; None if nothing."""

    @property
    @abstractmethod
    def served(self) -> dict[str, Any]:
        """How it serves, as a row has it."""

    async def open(self) -> None:
        """Start the process and wait until it serves.

        Raises:
            RivalError: with its last words.
        """
        port = free_port()
        command, settings = self.command(port)
        handle, words = tempfile.mkstemp(prefix=f"{self.name}-", suffix=".log")
        self._words, self._url = Path(words), f"http://127.0.0.1:{port}"
        with open(handle, "wb") as log:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=envs.clean_environment(settings),
                cwd=envs.HERE.parent,
            )
        await self._wait()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    async def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                words = self._words.read_text()[-envs.TAIL :]
                await self.close()
                raise RivalError(f"{self.name} ended at its start:\n{words}")
            try:
                if httpx.get(self._url + self.health, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
        words = self._words.read_text()[-envs.TAIL :]
        await self.close()
        raise RivalError(f"{self.name} did not serve within {self.start_seconds:.0f} s:\n{words}")

    async def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        """Post, and read server-sent events.

        Raises:
            RivalError: if the server refuses, or the stream holds an error.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as client,
            client.stream("POST", self.path, json=self.body(ask)) as response,
        ):
            if response.status_code != 200:
                raise RivalError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RivalError(str(event["error"])[:300])
                delivery = self.delivery(event)
                if delivery is not None:
                    yield delivery

    async def close(self) -> None:
        """End the process: politely at first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=self.stop_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._words.unlink(missing_ok=True)
