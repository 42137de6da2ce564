"""Rivals as servers of their own: llama.cpp's and OpenVINO GenAI's, with their own batching and prefix cache."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import envs
from benchmarks.common.envs import RivalError
from benchmarks.load import build
from benchmarks.load.client import Delivery
from benchmarks.load.server import Body, Server
from benchmarks.load.workload import Ask
from ragjax.runner.device import BFLOAT16_FEATURES, cpu_features

THREADS = 2

Tokens = Callable[[Ask], Sequence[int]]
"""The prompt of a request in tokens, the same that ragjax makes of it."""


class LlamaServer(Server):
    """llama.cpp's server: a slot a client, continuous batching, the slots' prompt caches, and its cache in memory for
    the prompts of slots that are taken (`--cache-ram`, 8 GiB by default).

    reuse: also reuse chunks of this many tokens that moved (`--cache-reuse`), which is approximate; 0: not.
    """

    path = "/completion"

    def __init__(self, name: str, model: Path, kind: str, tokens: Tokens, *, slots: int, context: int, reuse: int = 0):
        super().__init__(name)
        self._model, self._kind, self._tokens = model, kind, tokens
        self._slots, self._context, self._reuse = slots, context, reuse

    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        """Its flags: two threads, flash attention, a context for each slot."""
        file = build.requantized(self._model, self._kind)
        self.versions = {"llama.cpp's server": f"of {build.package()}"}
        settings = {
            "--model": file, "--port": port, "--host": "127.0.0.1", "--threads": THREADS, "--threads-batch": THREADS,
            "--parallel": self._slots, "--ctx-size": self._slots * self._context, "--flash-attn": "on",
            "--cache-reuse": self._reuse,
        }  # fmt: skip
        words = [str(word) for pair in settings.items() for word in pair]
        return [build.binary("llama-server"), *words, "--cont-batching", "--cache-prompt"], {}

    def body(self, ask: Ask) -> Body:
        """Greedy; the answer has all its tokens, whatever they are."""
        return {
            "prompt": [int(token) for token in self._tokens(ask)],
            "n_predict": ask.output,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "cache_prompt": True,
        }

    def delivery(self, event: Body) -> Delivery | None:
        """A token an event; the last one has the figures."""
        if not event.get("stop"):
            return Delivery()
        timings = event["timings"]
        found, computed = int(timings.get("cache_n", 0)), int(timings["prompt_n"])
        return Delivery(True, int(event["tokens_predicted"]), found + computed, found)

    @property
    def served(self) -> dict[str, Any]:
        """A prefix cache a slot."""
        return {"strategy": "prefix", "policy": "slots"}


class Piped:
    """A worker that streams JSON lines: `{"id", "tokens", "new"}` in, `{"id", "text": true}` for each delivery and
    `{"id", "done": {"output", "prompt", "found"}}` or `{"id", "error"}` out; first of all `{"ready": versions}`.
    """

    def __init__(
        self, name: str, command: Callable[[], Sequence[str | Path]], tokens: Tokens, served: Mapping[str, Any]
    ):
        self.name, self.served = name, dict(served)
        self.versions: dict[str, str] = {}
        self._command, self._tokens = command, tokens
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._events: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        """The worker's deliveries.

        Raises:
            RivalError: if it ends, or reports an error.
        """
        assert self._process is not None and self._process.stdin is not None
        number = next(self._numbers)
        events = self._events[number] = asyncio.Queue()
        tokens = [int(token) for token in self._tokens(ask)]
        self._process.stdin.write((json.dumps({"id": number, "tokens": tokens, "new": ask.output}) + "\n").encode())
        try:
            while True:
                event = await events.get()
                if "error" in event:
                    raise RivalError(str(event["error"]))
                if "done" in event:
                    done = event["done"]
                    yield Delivery(True, done["output"], done.get("prompt"), done.get("found"))
                    return
                yield Delivery()
        finally:
            del self._events[number]

    async def open(self) -> None:
        """Start the worker and wait until it is ready.

        Raises:
            RivalError: if it ends instead.
        """
        self._process = await asyncio.create_subprocess_exec(
            *[str(word) for word in self._command()],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=envs.clean_environment(),
            cwd=envs.HERE.parent,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            await self.close()
            raise RivalError(f"{self.name} ended at its start (its words are above)")
        self.versions = json.loads(line)["ready"]
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if event["id"] in self._events:
                self._events[event["id"]].put_nowait(event)
        for events in self._events.values():
            events.put_nowait({"error": f"{self.name} ended"})

    async def close(self) -> None:
        """End the worker: its input ends."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 15)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            with contextlib.suppress(Exception):
                await self._reading
        self._process = self._reading = None


def openvino(name: str, model: Path, tokens: Tokens, *, clients: int, gigabytes: float) -> Piped:
    """OpenVINO GenAI: continuous batching, prefix cache, two threads, bfloat16 where the CPU has its products."""
    precision = "bf16" if cpu_features() & BFLOAT16_FEATURES else "f32"

    def command() -> Sequence[str | Path]:
        worker = envs.WORKERS / "openvino_server.py"
        return [envs.python("openvino"), worker, model, str(THREADS), precision, str(gigabytes), str(clients)]

    return Piped(name, command, tokens, {"strategy": "prefix", "policy": "lru"})
