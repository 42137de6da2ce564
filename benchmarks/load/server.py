"""Servers under load: a process of its own that streams over HTTP, and the client's side of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import envs
from benchmarks.common.envs import RivalError
from benchmarks.common.process import free_port, running, wait
from benchmarks.common.samples import STORE
from benchmarks.latency.checkpoint import write_weights
from benchmarks.load.client import Delivery
from benchmarks.load.llamacpp import binary, package, requantized
from benchmarks.load.system import index_folder, served
from benchmarks.load.workload import Ask, Workload
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import DEFAULTS, flags_of, spelled
from ragjax.core import Chunk, EngineOptions, Hit, Message
from ragjax.engine.knowledge import base_opener
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint
from ragjax.prompting.chat import chat_prompt, graph_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.triples import RelationPath, subgraphs_of
from ragjax.runner.device import BFLOAT16_FEATURES, cpu_features

Body = Mapping[str, Any]
START_S = 300.0  # in which a server is ready


class Server(ABC):
    """A process that answers on a port. path: where requests are posted."""

    path = "/"

    def __init__(self, name: str):
        self.name = name
        self.versions: dict[str, str] = {}
        self._running = contextlib.ExitStack()
        self._url = ""

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
        self._url = f"http://127.0.0.1:{port}"
        log = Path(self._running.enter_context(tempfile.TemporaryDirectory()), "words")
        process = self._running.enter_context(running(command, envs.clean_environment(settings), log))
        try:
            wait(process, self._url, pause=0.2, limit_s=START_S, log=log)
        except RivalError as error:
            await self.close()
            raise RivalError(f"{self.name}: {error}") from None

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
        self._running.close()


THREADS = 2

Tokens = Callable[[Ask], Sequence[int]]  # the prompt of a request in tokens, the same that ragjax makes of it


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
        file = requantized(self._model, self._kind)
        self.versions = {"llama.cpp's server": f"of {package()}"}
        settings = {
            "--model": file, "--port": port, "--host": "127.0.0.1", "--threads": THREADS, "--threads-batch": THREADS,
            "--parallel": self._slots, "--ctx-size": self._slots * self._context, "--flash-attn": "on",
            "--cache-reuse": self._reuse,
        }  # fmt: skip
        words = [str(word) for pair in settings.items() for word in pair]
        return [binary("llama-server"), *words, "--cont-batching", "--cache-prompt"], {}

    def body(self, ask: Ask) -> Body:
        """Greedy; the answer has all its tokens, whatever they are."""
        return {
            "prompt": [int(token) for token in self._tokens(ask)], "n_predict": ask.output, "temperature": 0.0,
            "stream": True, "ignore_eos": True, "cache_prompt": True,
        }  # fmt: skip

    def delivery(self, event: Body) -> Delivery | None:
        """A token an event; the last one has the figures."""
        if not event.get("stop"):
            return Delivery()
        timings = event["timings"]
        found, computed = int(timings.get("cache_n", 0)), int(timings["prompt_n"])
        return Delivery(True, int(event["tokens_predicted"]), found + computed, found)

    @property
    def served(self) -> dict[str, Any]:
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
            *[str(word) for word in self._command()], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env=envs.clean_environment(), cwd=envs.HERE.parent,
        )  # fmt: skip
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


def vllm(name: str, model: Path, tokens: Tokens, *, clients: int, gigabytes: float, context: int) -> Piped:
    """The build of vLLM for CPUs: continuous batching, prefix cache, all cores, the weights in bfloat16."""

    def command() -> Sequence[str | Path]:
        worker = envs.WORKERS / "vllm_server.py"
        return [envs.python("vllm"), worker, in_bfloat16(model), str(gigabytes), str(clients), str(context)]

    return Piped(name, command, tokens, {"strategy": "prefix", "policy": "lru"})


def in_bfloat16(model: Path) -> Path:
    """A Llama's weights as a Hugging Face folder in bfloat16, written once.

    Raises:
        RivalError: if the model is no Llama.
    """
    checkpoint = open_checkpoint(model)
    if checkpoint.config.family != "llama":
        raise RivalError(f"{model} is a {checkpoint.config.family}: vllm is compared on a Llama; leave it out")
    folder = envs.HOMES / "models" / f"{model.stem.rsplit('.', 1)[0]}-bfloat16"
    return write_weights(checkpoint.config, folder, checkpoint.tensors)


class Prompts:
    """Tokens by request, made ahead of time: rivals get retrieval for nothing."""

    def __init__(self, workload: Workload, model: Path):
        """Retrieval uses the workload's knowledge base, made if it is not kept yet."""
        self._tokenizer = Tokenizer.load(model)
        self._chunker = Chunker(partial(self._tokenizer.encode, special=False, continued=True))
        self._documents = {document.id: document for document in workload.documents}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        base = self._open(workload, index_folder(model)) if any(ask.top_k for ask in workload.asks) else None
        self._tokens = {ask.id: self._prompt(ask, base) for ask in workload.asks}
        if base is not None:
            base.close()

    def __call__(self, ask: Ask) -> list[int]:
        """The tokens of a request's prompt."""
        return self._tokens[ask.id]

    def _open(self, workload: Workload, folder: Path) -> KnowledgeBase:
        options = EngineOptions("none", index_dir=folder)
        base = base_opener(options, self._tokenizer, packaged_encoder)(workload.knowledge)
        base.add(workload.documents)
        return base

    def _prompt(self, ask: Ask, base: KnowledgeBase | None) -> list[int]:
        messages = (Message("user", ask.question),)
        if ask.paths is not None:
            subgraphs = subgraphs_of([RelationPath(steps) for steps in ask.paths])
            made = graph_prompt(self._tokenizer, messages, subgraphs, trees=False)
            return [int(token) for token in made.tokens]
        if ask.documents is not None:
            hits = tuple(Hit(chunk, 1.0) for name in ask.documents for chunk in self._cut(name))
        elif base is not None and ask.top_k:
            hits = base.search(ask.question, ask.top_k)
        else:
            hits = None
        return [int(token) for token in chat_prompt(self._tokenizer, messages, hits).tokens]

    def _cut(self, name: str) -> tuple[Chunk, ...]:
        if name not in self._chunks:
            self._chunks[name] = self._chunker.chunks(self._documents[name])
        return self._chunks[name]


class OwnServer(Server):
    """Our server, over chat completions. Answers end where the model ends them: HTTP has no way to go on."""

    path = "/v1/chat/completions"

    def __init__(self, name: str, options: EngineOptions, workload: Workload):
        super().__init__(name)
        self._options, self._workload = options, workload
        self._found: dict[str, Any] = served(options, options.strategy)

    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        words: list[str | Path] = [sys.executable, "-m", "benchmarks.baseline", "--port", str(port)]
        for owner, default in ((self._options, DEFAULTS), (self._options.storage, DEFAULTS.storage)):
            for field, _, flag in flags_of(type(owner)):
                value = getattr(owner, field)
                if isinstance(value, bool):
                    words += [spelled(field, flag)] if value != getattr(default, field) else []
                elif value is not None and field not in ("knowledge", "graph"):
                    words += [spelled(field, flag), str(value)]
        return [*words, "--knowledge", self._knowledge()], {}

    def _knowledge(self) -> str:
        """The documents as a file that the server reads; its name is the knowledge base's."""
        if not self._workload.documents:
            return "none"
        file = STORE / f"{self._workload.knowledge}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": d.id, "title": d.title, "text": d.text}) for d in self._workload.documents)
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def body(self, ask: Ask) -> Body:
        rag: dict[str, Any] = {}
        if ask.paths is not None:
            rag |= {"graph": {"relation_paths": [list(path) for path in ask.paths]}, "strategy": self._options.strategy}
        elif ask.documents is not None:
            rag["documents"] = list(ask.documents)
        elif self._workload.documents:
            rag["top_k"] = ask.top_k
        return {
            "model": str(self._options.model), "messages": [{"role": "user", "content": ask.question}],
            "max_tokens": ask.output, "stream": True, "stream_options": {"include_usage": True}, "rag": rag,
        }  # fmt: skip

    def delivery(self, event: Body) -> Delivery | None:
        usage = event.get("usage")
        if usage is not None:
            found = usage["prompt_tokens_details"]["cached_tokens"]
            return Delivery(True, usage["completion_tokens"], usage["prompt_tokens"], found)
        said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return Delivery(text=said) if said else None

    @property
    def served(self) -> dict[str, Any]:
        return self._found
