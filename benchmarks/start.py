"""Start of a server: seconds until it is ready and until its first question is answered, and memory.

`first` is a start with nothing compiled and no index, the models downloaded; `later` is the next one. `ready_s` and
`first_answer_s` count from the start of the process, on the demo's documents. `rss_mb` is what is resident after the
first answer, which waits until the documents are read, `peak_mb` the most, with eight questions at a time behind it;
`programs` are those compiled by the first answer. In a later start `prepared_s` counts likewise until the demo's
passages are computed behind their neighbours, with the questions in between. llama.cpp and OpenVINO load the model and
answer one prompt, where their environments exist (`benchmarks/.envs`); `--llamacpp` and `--openvino` make them.

A second table has what a strategy's first request takes where nothing of it is compiled, beside a later one, and the
longest gap in the stream of another client meanwhile, next to the longest gap without such a request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import envs
from benchmarks.common.process import wait
from benchmarks.common.report import MODEL, Benchmark, Parser, Session
from benchmarks.latency.prompt import workload
from benchmarks.latency.system import own_cache, peak_mb, resident_mb, systems
from benchmarks.load.own_server import body, served
from ragjax.models import hub
from ragjax.models.tokenizer import Tokenizer

COLUMNS = ("system", "state", "ready_s", "first_answer_s", "rss_mb", "peak_mb", "programs", "prepared_s")
RIVALS = {"llama.cpp-q4_1": "llamacpp", "openvino": "openvino"}
QUESTION = "Who keeps the lighthouse?"
ASKED_AT_ONCE = 8


async def ask(url: str, question: str, strategy: str | None = None, *, tokens: int = 32) -> float:
    """Seconds until a question is answered."""
    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{url}/v1/chat/completions", json=body(question, strategy, tokens=tokens))
    answer.raise_for_status()
    return time.perf_counter() - begun


async def at_once(url: str) -> None:
    await asyncio.gather(*(ask(url, f"{QUESTION} ({i})") for i in range(ASKED_AT_ONCE)))


@dataclass
class Use:
    """A stream and what another client asked meanwhile: the longest gap in the one, and the seconds of the other."""

    gap_s: float
    answer_s: float | None = None


async def use(url: str, strategy: str | None = None, tokens: int = 100) -> Use:
    """Have a story streamed. strategy: another client asks by it as the stream begins (None: nobody)."""
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
    gap = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
    return Use(gap, None if other is None else await other)


def started(cache: Path, state: str, aside: Path | None = None) -> dict[str, Any]:
    """The row of a start. aside: a cache folder that is made as this one is at the first answer."""
    begun = time.perf_counter()
    with served(cache) as (process, url):
        wait(process, url)
        ready_s = time.perf_counter() - begun
        wait(process, url, lambda health: not health.get("indexing", {}).get("running"))  # the answer is in a document
        asyncio.run(ask(url, QUESTION))
        first_answer_s = time.perf_counter() - begun
        rss = resident_mb(process.pid)
        programs = sum(1 for _ in (cache / "executables").iterdir())
        if aside is not None:
            for folder in cache.iterdir():
                if folder.name != "executables":
                    (aside / folder.name).symlink_to(folder, target_is_directory=True)
            shutil.copytree(cache / "executables", aside / "executables", ignore=shutil.ignore_patterns("tmp*"))
        asyncio.run(at_once(url))
        peak = peak_mb(process.pid)
        if aside is None:
            wait(process, url, lambda health: not health.get("preprocessing", {}).get("running"))
        prepared_s = time.perf_counter() - begun if aside is None else None
    return row("ragjax", state, ready_s, first_answer_s, rss, peak, programs, prepared_s)


def first_uses(cache: Path) -> list[dict[str, Any]]:
    """Rows of strategies that are used for the first time, as soon as a server is ready.

    By default (`prepared`) a strategy gives way to `prefix` while its passages are prepared, and the later request
    waits until they are; with `--no-preprocess` it computes them itself, at either time.
    """
    return [use for flags in ((), ("--no-preprocess",)) for use in _first_uses(cache, flags)]


def _first_uses(cache: Path, flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    own = cache.with_name(f"{cache.name}{len(flags)}")
    shutil.copytree(cache, own, symlinks=True)
    with served(own, *flags) as (process, url):
        wait(process, url)
        first = {strategy: asyncio.run(use(url, strategy)) for strategy in ("anchor", "blend")}
        wait(process, url, lambda health: not health["programs_left"])
        wait(process, url, lambda health: not health.get("preprocessing", {}).get("running"))
        quiet = asyncio.run(use(url))
        later = {strategy: asyncio.run(use(url, strategy)) for strategy in first}
    shutil.rmtree(own)
    for strategy, one in first.items():
        yield {
            "strategy": strategy, "prepared": not flags, "first_s": one.answer_s, "later_s": later[strategy].answer_s,
            "gap_s": one.gap_s, "later_gap_s": later[strategy].gap_s, "quiet_gap_s": quiet.gap_s,
        }  # fmt: skip


def row(*figures: str | float | None) -> dict[str, Any]:
    return dict(zip(COLUMNS, figures, strict=True))


def rivals(scratch: Path, asked: Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the others that are asked for or there; they compile nothing, so each start is like the first."""
    work = workload(Tokenizer.load(hub.resolve(MODEL).path))
    for system in systems(scratch, quick=True):
        home = RIVALS.get(system.name, "none")
        if not getattr(asked, home, False) and not (envs.HOMES / home / "installed.sha256").exists():
            continue
        envs.python(home)  # made before the clock runs
        begun = time.perf_counter()
        system.worker = system.open()
        ready_s = time.perf_counter() - begun
        system.generate(system.cases[0], work, 32)
        first_s, pid = time.perf_counter() - begun, system.pid
        yield row(system.name, "later", ready_s, first_s, resident_mb(pid), peak_mb(pid), None, None)
        system.close()


def measured(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    hub.resolve(MODEL)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as aside:
        cache = Path(own_cache(Path(folder)))
        rows = [started(cache, "first", Path(aside)), started(cache, "later")]
        if chosen.quick:
            return rows
        session.tables["first_use"] = first_uses(Path(aside))
        return [*rows, *rivals(Path(folder), chosen)]


def add_flags(flags: Parser) -> None:
    for home in RIVALS.values():
        flags.add(f"--{home}", action="store_true", help=f"make the environment of {home} if it is not there")


main = Benchmark("start", __doc__, COLUMNS, measured, flags=add_flags).main

if __name__ == "__main__":
    sys.exit(main())
