"""The programs whose latency is compared: how each is started and answers a prompt, and how busy others are."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import envs
from benchmarks.common.report import MODEL
from benchmarks.latency.prompt import BRIEF, COLD_PREFIX, LONG, OWN_CASES, WARM_PREFIX, Case, Workload, common_prefix
from ragjax.core import Prompt
from ragjax.models import hub
from ragjax.runner.device import BFLOAT16_FEATURES, cpu_features

THREADS = 2


def peak_mb(pid: int) -> float | None:
    """Most memory a process had resident since its start or the last `reset_peak`, in 1e6 bytes (Linux)."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 / 1e6


def reset_peak(pid: int) -> None:
    """Begin a new peak, where the system allows it; else peaks include the start."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        print("peak memory includes the start: this system does not let it be reset", file=sys.stderr)


def resident_mb(pid: int) -> float:
    """Memory a process has resident now, in 1e6 bytes."""
    return float(psutil.Process(pid).memory_info().rss / 1e6)


class OtherLoad:
    """Measures how many cores other processes keep busy while one, and those that it started, work."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._began, self._busy, self._own = time.perf_counter(), self._all_busy(), self._own_busy()

    def so_far(self) -> float:
        """Mean number of cores since the beginning."""
        seconds = time.perf_counter() - self._began
        others = self._all_busy() - self._busy - self._own_busy() + self._own
        return round(max(0.0, others / seconds), 3)

    def _all_busy(self) -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system)

    def _own_busy(self) -> float:
        busy = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                times = process.cpu_times()
                busy += times.user + times.system
        return busy


@dataclass
class System:
    """One program under test: its worker, and how it is asked for a case."""

    name: str
    cases: Sequence[Case]
    script: str = ""  # of the worker, in the environment `home`
    home: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the worker's request `load`
    versions: dict[str, str] = field(default_factory=dict)
    worker: envs.Worker | None = None

    def open(self) -> envs.Worker:
        worker = envs.Worker([envs.python(self.home), envs.WORKERS / self.script])
        self.versions |= worker.ask({"op": "load", "threads": THREADS, **self.settings})["versions"]
        return worker

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case: `ttft_ms`, `decode_tokens_per_s`, `tokens`, and what else the system knows."""
        return self.ask({"op": "generate", "tokens": work.of(case).tokens.tolist(), "new": new})

    def start(self, work: Workload) -> dict[str, Any]:
        """Start and warm up with one long (else short) request; seconds to ready, and memory."""
        began = time.perf_counter()
        self.worker = self.open()
        seconds = time.perf_counter() - began
        self.generate(self.cases[0], work, 2)
        return {"start_s": seconds, "startup_peak_mb": peak_mb(self.pid), "resident_mb": resident_mb(self.pid)}

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.worker is not None
        return self.worker.ask(request)

    @property
    def pid(self) -> int:
        assert self.worker is not None
        return self.worker.pid

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


@dataclass
class LlamaCpp(System):
    """llama.cpp with the shipped file, or with the same weights requantised to Q4_0."""

    script: str = "llamacpp_worker.py"
    home: str = "llamacpp"
    requantized: Path | None = None

    def open(self) -> envs.Worker:
        worker = envs.Worker([envs.python(self.home), envs.WORKERS / self.script])
        model = self.settings["model"]
        if self.requantized is not None:
            target = str(self.requantized)
            worker.ask({"op": "requantize", "source": model, "target": target, "threads": THREADS})
            model = target
        self.versions |= worker.ask({"op": "load", "model": model, "threads": THREADS})["versions"]
        return worker

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case; a warm one keeps what it shares with the prompt before."""
        prompt, kept = work.of(case), 0
        if case.state == "warm":
            self.ask({"op": "generate", "tokens": work.before.tokens.tolist(), "new": 1})
            kept = common_prefix(prompt, work.before)
        request = {"op": "generate", "tokens": prompt.tokens.tolist(), "new": new, "keep": kept}
        return {**self.ask(request), "reused_tokens": kept}


@dataclass
class Ragjax(System):
    """Our engine."""

    cache: str | None = None

    def open(self) -> envs.Worker:
        settings = {"PYTHONPATH": str(envs.HERE.parent)} | ({"RAGJAX_CACHE": self.cache} if self.cache else {})
        worker = envs.Worker([sys.executable, envs.WORKERS / "ragjax_worker.py"], settings)
        worker.ask({"op": "load", "model": MODEL, "dtype": "auto"})
        return worker

    def start(self, work: Workload) -> dict[str, Any]:
        """With a cache of its own, start twice: the first start compiles and dequantises, the second finds both."""
        if self.cache is None:
            return super().start(work)
        first = super().start(work)
        self.close()
        second = super().start(work)
        return {**second, "first_start_s": first["start_s"], "startup_peak_mb": first["startup_peak_mb"]}

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case, from an empty cache or behind the prompt before."""
        self.ask({"op": "clear"})
        if case.state == "warm":
            self._ask(work.before, case.strategy, 1)
        return self._ask(work.of(case), case.strategy, new)

    def _ask(self, prompt: Prompt, strategy: str, new: int) -> Mapping[str, Any]:
        segments = [(s.id, s.kind.value, s.tokens.tolist()) for s in prompt.segments]
        return self.ask({"op": "generate", "segments": segments, "strategy": strategy, "new": new})


def systems(scratch: Path, *, quick: bool) -> list[System]:
    model = {"model": str(hub.resolve(MODEL).path)}
    q4_0 = envs.HOMES / "models" / f"{MODEL}-Q4_0.gguf"
    # OpenVINO's prefix cache is off, so that each prompt is computed whole
    precision = {"precision": "bf16" if cpu_features() & BFLOAT16_FEATURES else "f32"}
    torch, both, three = ("transformers_worker.py", "transformers"), (LONG, BRIEF), (LONG, BRIEF, WARM_PREFIX)
    everyone: list[System] = [
        Ragjax("ragjax", OWN_CASES, cache=None if quick else own_cache(scratch)),
        System("transformers-f32", both, *torch, {**model, "dtype": "float32"}),
        System("transformers-bf16", both, *torch, {**model, "dtype": "bfloat16"}),
        LlamaCpp("llama.cpp-q4_1", three, settings=model),
        LlamaCpp("llama.cpp-q4_0", three, settings=model, requantized=q4_0),
        System("openvino", both, "openvino_worker.py", "openvino", {**model, **precision}),
    ]
    if not quick:
        return everyone
    left_out = {"ragjax": {COLD_PREFIX}, "llama.cpp-q4_1": {LONG, WARM_PREFIX}, "llama.cpp-q4_0": {WARM_PREFIX}}
    for system in everyone:
        system.cases = [case for case in system.cases if case not in left_out.get(system.name, ())]
    return [system for system in everyone if system.name != "transformers-f32"]


def own_cache(scratch: Path) -> str:
    """A cache directory that holds the downloaded models and nothing derived from them."""
    scratch.mkdir(exist_ok=True)
    (scratch / "models").symlink_to(hub.cache_dir() / "models", target_is_directory=True)
    return str(scratch)
