"""The HTTP server on this machine's device: its start, its memory, and first tokens beside the bare runner's.

The packaged model, and Llama-3-8B's shapes with random weights; with --quick a tiny shape. Each server is a process of
its own with `--knowledge none`; requests bring passages of 512 tokens and ask for one token, so a request's time is
that of its first token. `full` computes everything; `naive` finds the passages of the request before it, in another
order. `bare_ms` is the runner alone on as many tokens, `over_ms` what the server adds. `start_s` runs to the first
answer of /health; `device_gb` is what the device holds more than before, `host_gb` the process's peak.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import gpu, report
from benchmarks.common.machine import ROOT
from benchmarks.common.process import free_port, running, wait
from benchmarks.latency import checkpoint
from benchmarks.latency.bare import FULL, REHEARSAL, Ours, Setting
from benchmarks.latency.system import peak_mb
from ragjax.models.config import ModelConfig
from ragjax.models.hub import resolve
from ragjax.models.weights import open_checkpoint

COLUMNS = (
    "model", "strategy", "context_tokens", "start_s", "host_gb", "device_gb", "http_ms", "bare_ms", "over_ms",
    "cached_tokens", "fallbacks", "failed",
)  # fmt: skip
MEMORY_SHARE, SERVER_SHARE = 0.35, 0.55  # of the GPU, for the bare runner and for the server
OVER_MS = 15.0
RUNS = 5
START_S = 240.0
WORDS = ("salt", "fish", "tide", "lamp", "keeper", "island", "harbour", "storm", "ledger", "winter", "boat", "glass")


@dataclass(frozen=True)
class Model:
    """What is served, and at which lengths."""

    name: str
    path: str
    config: ModelConfig
    contexts: tuple[int, ...]
    cache_gb: float
    letters: float = 1.0  # of a token


def models(quick: bool) -> Iterator[Model]:
    folder = ROOT / "build" / "gpu"
    if quick:
        tiny = checkpoint.SHAPES["tiny"]
        yield Model("tiny", str(checkpoint.write_random(tiny, folder / "tiny")), tiny, (512,), 0.05)
        return
    packaged = resolve(report.MODEL)
    yield Model(
        packaged.name, str(packaged.path), open_checkpoint(packaged.path).config, (2048, 7168), 2.0, letters=5.0
    )
    llama = checkpoint.SHAPES["llama-3-8b"]
    path = checkpoint.write_random(llama, folder / "llama-3-8b")
    yield Model("llama-3-8b", str(path), llama, (4096, 16384, 30720), 12.0)


class Client:
    """Asks one server, and reads what it counts."""

    def __init__(self, url: str, model: Model):
        self._http, self._model = httpx.Client(base_url=url, timeout=120.0), model
        self._random = np.random.default_rng(0)
        self._name = self._http.get("/v1/models").json()["data"][0]["id"]

    def passages(self, context: int) -> list[dict[str, str]]:
        letters = int(480 * self._model.letters)
        made = (" ".join(self._random.choice(WORDS, letters // 3))[:letters] for _ in range(max(1, context // 512)))
        return [{"id": f"p{i}", "text": text} for i, text in enumerate(made)]

    def ask(self, passages: Sequence[Mapping[str, str]], strategy: str) -> tuple[float, int, int]:
        """Milliseconds, tokens of the prompt, and how many of them were found."""
        body = {
            "model": self._name, "messages": [{"role": "user", "content": "Who keeps the lamp?"}], "max_tokens": 1,
            "temperature": 0, "rag": {"documents": passages, "strategy": strategy},
        }  # fmt: skip
        began = time.perf_counter()
        answer = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        took = (time.perf_counter() - began) * 1e3
        usage = answer["usage"]
        return took, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def first_token(self, context: int, strategy: str) -> dict[str, Any]:
        """Medians, after one request that compiles and one that fills the cache."""
        passages, found = self.passages(context), []
        for run in range(RUNS + 2):
            if strategy == "full":
                passages = self.passages(context)
            found.append(self.ask(passages[run % 2 :] + passages[: run % 2], strategy))
        times, tokens, cached = np.median(found[2:], axis=0).tolist()
        return {"http_ms": times, "context_tokens": int(tokens), "cached_tokens": int(cached)}

    def fallbacks(self) -> int:
        counted = re.findall(
            r"^ragjax_attention_fallbacks_total(?:{.*})? (\S+)$", self._http.get("/metrics").text, re.M
        )
        return int(sum(map(float, counted)))


@contextmanager
def serving(model: Model, log: Path) -> Iterator[tuple[Client, dict[str, Any]]]:
    """A client of a server, and what its start took; it ends with the context."""
    port, before = free_port(), device_gb()
    command = [sys.executable, "-m", "ragjax.serve", "--port", str(port), "--model", model.path, "--knowledge", "none"]
    command += ["--device-cache-gb", str(model.cache_gb), "--host-cache-gb", "2"]
    command += ["--max-context", str(min(model.config.context_length, max(model.contexts) + 1024))]
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": str(SERVER_SHARE)}
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with running(command, {**os.environ, **share}, log) as server:
        wait(server, url, limit_s=START_S, log=log)
        start: dict[str, Any] = {"start_s": time.perf_counter() - began}
        client = Client(url, model)
        yield client, start
        start |= {"host_gb": (peak_mb(server.pid) or 0.0) / 1e3, "fallbacks": client.fallbacks()}
        now = device_gb()
        start["device_gb"] = None if now is None or before is None else now - before


def device_gb() -> float | None:
    """What the first GPU holds; None where nothing tells."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(told.split()[0]) * 2**20 / 1e9
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def measure(record: gpu.Record, model: Model, setting: Setting) -> None:
    """Rows of a model: first those of the server, which is started if one of them is missing, then the runner's."""
    wanted = [(context, strategy) for context in model.contexts for strategy in ("full", "naive")]
    keys = [f"{model.name}/{context}/{strategy}" for context, strategy in wanted]
    if not all(map(record.has, [*keys, f"{model.name}/start"])) and record.clock.left > 0:
        with serving(model, ROOT / "build" / "gpu" / f"served-{model.name}.log") as (client, start):
            for key, (context, strategy) in zip(keys, wanted, strict=True):
                known = {"model": model.name, "strategy": strategy}
                record.row(key, known, partial(client.first_token, context, strategy))
        record.row(f"{model.name}/start", {"model": model.name, "strategy": "start"}, lambda: start)
    gc.collect()
    lengths = [(key, record.rows[key]) for key in keys if record.rows.get(key, {}).get("context_tokens")]
    longest = max((row["context_tokens"] for _, row in lengths), default=0)
    entries = max(setting.entries, longest // setting.page + 2 * longest // setting.chunk + 8)
    ours = Ours(model.config, replace(setting, contexts=(longest,), entries=entries))
    for key, row in lengths:
        layout = setting.layout(row["context_tokens"])
        work = layout.full() if row["strategy"] == "full" else layout.naive()
        known = {name: row[name] for name in ("model", "strategy", "context_tokens")} | {"system": "bare"}
        record.row(f"{key}/bare", known, partial(ours.first_token, [work], RUNS))


def joined(rows: Sequence[report.Row]) -> list[report.Row]:
    """The server's rows, each with the runner's time; the runner's own are left out, but for failed ones."""

    def key(row: report.Row) -> tuple[Any, ...]:
        return row["model"], row["strategy"], row.get("context_tokens")

    bare = {key(row): row["ttft_ms"] for row in rows if row.get("system") == "bare" and row.get("ttft_ms") is not None}
    made = []
    for row in rows:
        if row.get("system") != "bare":
            found = bare.get(key(row)) if row.get("http_ms") is not None else None
            made.append(row if found is None else {**row, "bare_ms": found, "over_ms": row["http_ms"] - found})
        elif row.get("failed"):
            made.append(row)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    chosen, record = gpu.begin("served", __doc__, arguments, MEMORY_SHARE)
    setting = REHEARSAL if chosen.quick else FULL
    with record.stoppable():
        for model in models(chosen.quick):
            measure(record, model, setting)
    rows = joined(list(record.rows.values()))
    over, fell = ([row[name] for row in rows if row.get(name) is not None] for name in ("over_ms", "fallbacks"))
    most = f"at most {OVER_MS:g} ms"
    gpu.show_gates([
        gpu.gate("what HTTP adds to a first token", most, max(over, default=None), lambda x: x <= OVER_MS),
        gpu.gate("attentions that fell back", "0", sum(fell) if fell else None, lambda x: x == 0),
    ])  # fmt: skip
    return gpu.conclude(record, joined, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
