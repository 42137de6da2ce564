"""Start of a server: seconds until it is ready and until its first question is answered, and memory.

`first` is a start with nothing compiled and no index, the models downloaded; `later` is the next one. `ready_s` and
`first_answer_s` count from the start of the process, on the demo's documents. `rss_mb` is what is resident after the
first answer, `peak_mb` the most, with eight questions at a time behind it; `programs` are the compiled ones on disk.
llama.cpp and OpenVINO load the model and answer one prompt, where their environments exist (`benchmarks/.envs`).

A second table has what a strategy's first request takes beside its third, and the longest gap in the stream of another
client meanwhile, next to the longest gap without such a request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import httpx

from benchmarks.common import envs
from benchmarks.common.envs import RivalError
from benchmarks.common.report import MODEL, Benchmark, Session
from benchmarks.latency.prompt import workload
from benchmarks.latency.system import own_cache, peak_mb, resident_mb, systems
from benchmarks.load.server import free_port
from ragjax.models import hub
from ragjax.models.tokenizer import Tokenizer

COLUMNS = ("system", "state", "ready_s", "first_answer_s", "rss_mb", "peak_mb", "programs")
RIVALS = {"llama.cpp-q4_1": "llamacpp", "openvino": "openvino"}
QUESTION = "Who keeps the lighthouse?"
ASKED_AT_ONCE = 8
START_S = 900.0


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


def wait(process: Popen[bytes], url: str) -> None:
    """Wait until a server is ready.

    Raises:
        RivalError: if it ends instead, or takes too long.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RivalError("ragjax did not serve")


def body(question: str, strategy: str | None = None, *, tokens: int = 32, stream: bool = False) -> Mapping[str, Any]:
    rag = {} if strategy is None else {"rag": {"strategy": strategy}}
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream, **rag}


async def ask(url: str, question: str, strategy: str | None = None, *, tokens: int = 32) -> float:
    """Seconds until a question is answered."""
    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body(question, strategy, tokens=tokens))
    answer.raise_for_status()
    return time.perf_counter() - begun


async def at_once(url: str) -> None:
    await asyncio.gather(*(ask(url, f"{QUESTION} ({i})") for i in range(ASKED_AT_ONCE)))


async def longest_gap(url: str, strategy: str | None, tokens: int = 150) -> float:
    """Longest gap in a stream, in seconds. strategy: another client asks by it as the stream begins (None: nobody)."""
    times, other = list[float](), None
    async with httpx.AsyncClient(timeout=None) as client:
        asked = body("Tell a long story.", tokens=tokens, stream=True)
        async with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {") or "choices" not in json.loads(line.removeprefix("data: ")):
                    continue
                times.append(time.perf_counter())
                if len(times) == 5 and strategy is not None:
                    other = asyncio.create_task(ask(url, QUESTION, strategy, tokens=2))
    if other is not None:
        await other
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def started(cache: Path, state: str) -> dict[str, Any]:
    """The row of a start."""
    begun = time.perf_counter()
    with served(cache) as (process, url):
        wait(process, url)
        ready_s = time.perf_counter() - begun
        asyncio.run(ask(url, QUESTION))
        first_answer_s = time.perf_counter() - begun
        rss = resident_mb(process.pid)
        asyncio.run(at_once(url))
        peak = peak_mb(process.pid)
        programs = sum(1 for file in (cache / "executables").rglob("*") if file.is_file())
    return row("ragjax", state, ready_s, first_answer_s, rss, peak, programs)


def first_uses(cache: Path) -> list[dict[str, Any]]:
    """Rows of strategies that are used for the first time.

    Nothing is preprocessed: a strategy whose passages are still being prepared would give way to `prefix`.
    """
    with served(cache, "--no-preprocess") as (process, url):
        wait(process, url)
        return [first_use(url, strategy) for strategy in ("anchor", "blend")]


def first_use(url: str, strategy: str) -> dict[str, Any]:
    quiet = asyncio.run(longest_gap(url, None))
    gap = asyncio.run(longest_gap(url, strategy))
    first, _, third = (asyncio.run(ask(url, QUESTION, strategy, tokens=2)) for _ in range(3))
    return {"strategy": strategy, "next_s": first, "third_s": third, "quiet_gap_s": quiet, "gap_s": gap}


def row(
    system: str, state: str, ready_s: float, first_s: float, rss: float, peak: float | None, programs: int | None
) -> dict[str, Any]:
    return dict(zip(COLUMNS, (system, state, ready_s, first_s, rss, peak, programs), strict=True))


def rivals(scratch: Path) -> Iterator[dict[str, Any]]:
    """Rows of the others whose environments exist; they compile nothing, so each start is like the first."""
    work = workload(Tokenizer.load(hub.resolve(MODEL).path))
    for system in systems(scratch, quick=True):
        if not (envs.HOMES / RIVALS.get(system.name, "none") / "installed.sha256").exists():
            continue
        begun = time.perf_counter()
        system.worker = system.open()
        ready_s = time.perf_counter() - begun
        system.generate(system.cases[0], work, 32)
        first_s, pid = time.perf_counter() - begun, system.pid
        yield row(system.name, "later", ready_s, first_s, resident_mb(pid), peak_mb(pid), None)
        system.close()


def measured(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    hub.resolve(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(own_cache(Path(folder)))
        rows = [started(cache, state) for state in ("first", "later")]
        session.tables["first_use"] = first_uses(cache)
        return [*rows, *([] if chosen.quick else rivals(Path(folder)))]


main = Benchmark("start", __doc__, COLUMNS, measured).main

if __name__ == "__main__":
    sys.exit(main())
