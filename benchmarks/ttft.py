"""Time to the first token of a retrieval-augmented prompt, and decode speed, beside transformers and llama.cpp.

    python -m benchmarks.ttft [--quick] [--json FILE]

The prompt is a system prompt, ten chunks of 200 tokens and a question of 30 (2K tokens); a shorter one has 512. All
systems get the same token ids and weights, have two threads and a process each, one of which works at a time, in
rounds that take every case in turn. Figures are medians over the rounds. `warm` means that the same chunks were
computed before, behind the same system prompt, with another question; `shuffled`, that they stood in another order.
llama.cpp's warm rows are its own reuse of an equal prefix. `other_load` is how many cores other programs kept busy
meanwhile: figures measured above 0.25 mean little, so such a measurement is tried twice more. `--quick` does not try
again, and leaves out transformers in float32, llama.cpp's Q4_1 at 2K, and the warm and cold rows that say least.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import envs, report
from ragjax.core import Kind, Prompt, Segment
from ragjax.models import hub
from ragjax.models.config import ModelConfig
from ragjax.models.tensors import expected_shapes
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint

MODEL = "smollm2-135m-instruct"
TEXTS = Path(__file__).parent / "texts"
SYSTEM = "Read the passages below with care, then go on where the last of them breaks off. Be brief and exact."
CHUNKS, CHUNK_TOKENS, QUESTION_TOKENS, SHORT = 10, 200, 30, 512
THREADS = 2
RUNS, QUICK_RUNS = 5, 3
ATTEMPTS = 3  # at a sample while others are busy
DECODED, QUICK_DECODED = 65, 17
BUSY = 0.25  # cores kept busy by others, above which a figure is worth little
LEAST_DECODED = 9  # fewer tokens than this say nothing about decode speed

COLUMNS: tuple[str, ...] = ("system", "strategy", "state", "order", "context_tokens", "ttft_ms", "decode_tokens_per_s")
COLUMNS += ("reused_tokens", "overhead_ms", "peak_mb", "runs", "other_load")
SYSTEM_COLUMNS: tuple[str, ...] = ("system", "first_start_s", "start_s", "startup_peak_mb", "resident_mb", "peak_mb")
RIVALS = ("transformers-bf16", "llama.cpp-q4_0")
"""Whom our rows are compared with."""


# ---------------------------------------------------------------------------------------- workload


@dataclass(frozen=True)
class Case:
    """One thing to measure. `long`: the 2K prompt; `decode`: also generate, to time the tokens after the first."""

    strategy: str
    state: str = "cold"
    order: str = "same"
    long: bool = True
    decode: bool = False

    @property
    def key(self) -> str:
        """Names the case in the store of samples."""
        return f"{self.strategy}/{self.state}/{self.order}/{'long' if self.long else 'short'}"


LONG = Case("full", decode=True)
BRIEF = Case("full", long=False, decode=True)
COLD_PREFIX = Case("prefix")
WARM_PREFIX = Case("prefix", "warm")
OWN_CASES = (
    LONG,
    BRIEF,
    COLD_PREFIX,
    WARM_PREFIX,
    Case("prefix", "warm", "shuffled"),
    Case("naive"),
    Case("naive", "warm"),
    Case("naive", "warm", "shuffled"),
)


@dataclass(frozen=True)
class Workload:
    """Prompts of real English text. `before` is asked first where a case is warm, `prompt` is measured."""

    before: Prompt
    prompt: Prompt
    shuffled: Prompt
    short: Prompt

    def of(self, case: Case) -> Prompt:
        """The prompt that a case measures."""
        if not case.long:
            return self.short
        return self.shuffled if case.order == "shuffled" else self.prompt


def workload(tokenizer: Tokenizer) -> Workload:
    """Cut the bundled texts into chunks and questions."""
    text = "\n\n".join(path.read_text().strip() for path in sorted(TEXTS.glob("*.txt")))
    words = tokenizer.encode(text, special=False)
    system = Segment("system", Kind.SYSTEM, tokenizer.encode(SYSTEM, special=False))
    end = CHUNKS * CHUNK_TOKENS
    chunks = [
        Segment(f"chunk-{i}", Kind.CHUNK, words[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS]) for i in range(CHUNKS)
    ]
    first, second = (
        Segment(f"question-{i}", Kind.QUERY, words[end + i * QUESTION_TOKENS : end + (i + 1) * QUESTION_TOKENS])
        for i in range(2)
    )
    order = np.random.default_rng(0).permutation(CHUNKS)
    last = SHORT - len(system) - 2 * CHUNK_TOKENS - QUESTION_TOKENS
    cut = replace(chunks[2], tokens=chunks[2].tokens[:last])
    return Workload(
        before=Prompt((system, *chunks, first)),
        prompt=Prompt((system, *chunks, second)),
        shuffled=Prompt((system, *(chunks[i] for i in order), second)),
        short=Prompt((system, *chunks[:2], cut, second)),
    )


# ----------------------------------------------------------------------------------------- systems


@dataclass
class System(ABC):
    """One program under test: how to start its worker, and how to measure a case."""

    name: str
    cases: Sequence[Case]
    versions: dict[str, str] = field(default_factory=dict)
    worker: envs.Worker | None = None

    @abstractmethod
    def open(self) -> envs.Worker:
        """Start the worker and load the model."""

    @abstractmethod
    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case: `ttft_ms`, `decode_tokens_per_s`, `tokens`, and what else the system knows."""

    def start(self, work: Workload) -> dict[str, Any]:
        """Start and warm up with one long (else short) request; seconds to ready, and memory."""
        began = time.perf_counter()
        self.worker = self.open()
        seconds = time.perf_counter() - began
        self.generate(self.cases[0], work, 2)
        return {"start_s": seconds, "startup_peak_mb": peak_mb(self.worker.pid), "resident_mb": resident_mb(self.pid)}

    @property
    def pid(self) -> int:
        """The worker's process id."""
        assert self.worker is not None
        return self.worker.pid

    def close(self) -> None:
        """End the worker, if it runs."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


@dataclass
class Transformers(System):
    """transformers on a CPU, with the dequantised weights."""

    dtype: str = "float32"
    model: str = ""

    def open(self) -> envs.Worker:
        """Start the worker and load the model."""
        worker = envs.Worker([envs.python("transformers"), envs.WORKERS / "transformers_worker.py"])
        request = {"op": "load", "model": self.model, "dtype": self.dtype, "threads": THREADS}
        self.versions |= worker.ask(request)["versions"]
        return worker

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case."""
        assert self.worker is not None
        return self.worker.ask({"op": "generate", "tokens": work.of(case).tokens.tolist(), "new": new})


@dataclass
class LlamaCpp(System):
    """llama.cpp with the shipped file, or with the same weights requantised to Q4_0."""

    model: str = ""
    requantized: Path | None = None

    def open(self) -> envs.Worker:
        """Start the worker and load the model."""
        worker = envs.Worker([envs.python("llamacpp"), envs.WORKERS / "llamacpp_worker.py"])
        if self.requantized is not None:
            target = str(self.requantized)
            worker.ask({"op": "requantize", "source": self.model, "target": target, "threads": THREADS})
        model = str(self.requantized or self.model)
        self.versions |= worker.ask({"op": "load", "model": model, "threads": THREADS})["versions"]
        return worker

    def generate(self, case: Case, work: Workload, new: int) -> Mapping[str, Any]:
        """Measure a case; a warm one keeps what it shares with the prompt before."""
        assert self.worker is not None
        prompt, kept = work.of(case), 0
        if case.state == "warm":
            self.worker.ask({"op": "generate", "tokens": work.before.tokens.tolist(), "new": 1})
            kept = common_prefix(prompt, work.before)
        request = {"op": "generate", "tokens": prompt.tokens.tolist(), "new": new, "keep": kept}
        return {**self.worker.ask(request), "reused_tokens": kept}


@dataclass
class Ragjax(System):
    """Our engine."""

    cache: str | None = None

    def open(self) -> envs.Worker:
        """Start the worker and load the model."""
        settings = {"PYTHONPATH": str(envs.HERE.parent)} | ({"RAGJAX_CACHE": self.cache} if self.cache else {})
        worker = envs.Worker([sys.executable, envs.WORKERS / "ragjax_worker.py"], settings)
        worker.ask({"op": "load", "model": MODEL, "dtype": "bfloat16"})
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
        assert self.worker is not None
        self.worker.ask({"op": "clear"})
        if case.state == "warm":
            self._ask(work.before, case.strategy, 1)
        return self._ask(work.of(case), case.strategy, new)

    def _ask(self, prompt: Prompt, strategy: str, new: int) -> Mapping[str, Any]:
        assert self.worker is not None
        segments = [(s.id, s.kind.value, s.tokens.tolist()) for s in prompt.segments]
        return self.worker.ask({"op": "generate", "segments": segments, "strategy": strategy, "new": new})


def common_prefix(one: Prompt, other: Prompt) -> int:
    """How many tokens two prompts share from the start on."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one.tokens[:n] != other.tokens[:n])
    return int(differs[0]) if len(differs) else n


def systems(scratch: Path, *, quick: bool) -> list[System]:
    """Who takes part, with the cases of each."""
    model = hub.resolve(MODEL).path
    q4_0 = envs.HOMES / "models" / f"{MODEL}-Q4_0.gguf"
    everyone: list[System] = [
        Ragjax("ragjax", OWN_CASES, cache=None if quick else own_cache(scratch)),
        Transformers("transformers-f32", (LONG, BRIEF), dtype="float32", model=str(model)),
        Transformers("transformers-bf16", (LONG, BRIEF), dtype="bfloat16", model=str(model)),
        LlamaCpp("llama.cpp-q4_1", (LONG, BRIEF, WARM_PREFIX), model=str(model)),
        LlamaCpp("llama.cpp-q4_0", (LONG, BRIEF, WARM_PREFIX), model=str(model), requantized=q4_0),
    ]
    if not quick:
        return everyone
    left_out = {"ragjax": {COLD_PREFIX}, "llama.cpp-q4_1": {LONG, WARM_PREFIX}, "llama.cpp-q4_0": {WARM_PREFIX}}
    for system in everyone:
        system.cases = [case for case in system.cases if case not in left_out.get(system.name, ())]
    return [system for system in everyone if system.name != "transformers-f32"]


def own_cache(scratch: Path) -> str:
    """A cache directory that holds the downloaded models and nothing derived from them."""
    (scratch / "models").symlink_to(hub.cache_dir() / "models", target_is_directory=True)
    return str(scratch)


# ---------------------------------------------------------------------------------------- measuring


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
    import psutil

    return float(psutil.Process(pid).memory_info().rss / 1e6)


class OtherLoad:
    """Measures how many cores other processes keep busy while one works."""

    def __init__(self, pid: int):
        """Begin."""
        import psutil

        self._process, self._psutil = psutil.Process(pid), psutil
        self._began, self._busy, self._own = time.perf_counter(), self._all_busy(), self._own_busy()

    def so_far(self) -> float:
        """Mean number of cores since the beginning."""
        seconds = time.perf_counter() - self._began
        others = self._all_busy() - self._busy - self._own_busy() + self._own
        return round(max(0.0, others / seconds), 3)

    def _all_busy(self) -> float:
        times = self._psutil.cpu_times()
        return float(times.user + times.nice + times.system)

    def _own_busy(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True)
class Effort:
    """How much is measured: runs of each case, tokens decoded, attempts at a sample while others are busy."""

    runs: int = RUNS
    new: int = DECODED
    attempts: int = ATTEMPTS


QUICK = Effort(QUICK_RUNS, QUICK_DECODED, 1)


def measure(everyone: Sequence[System], work: Workload, samples: report.Samples, effort: Effort) -> None:
    """Fill `samples`: rounds over all systems and cases, each round beginning with another system."""
    runs = effort.runs
    progress = report.Progress(runs * sum(len(system.cases) for system in everyone))
    for run in range(runs):
        for system in [*everyone[run % len(everyone) :], *everyone[: run % len(everyone)]]:
            for case in system.cases:
                key = f"{system.name}/{case.key}/{run}"
                if samples.get(key) is not None:
                    progress.skip()
                    continue
                make_ready(system, work, samples)
                samples.put(key, quietest(system, case, work, effort))
                progress.step(f"{system.name}: {case.key}")


def make_ready(system: System, work: Workload, samples: report.Samples) -> None:
    """Start a system that does not run yet, and note what the start took."""
    if system.worker is not None:
        return
    print(f"starting {system.name}", file=sys.stderr)
    started = system.start(work)
    reset_peak(system.pid)
    key = start_key(system)
    if samples.get(key) is None:
        samples.put(key, {**started, "versions": system.versions})


def start_key(system: System) -> str:
    """Names the start of a system in the store of samples."""
    return f"{system.name}/start"


def quietest(system: System, case: Case, work: Workload, effort: Effort) -> dict[str, Any]:
    """The first sample during which others were quiet; if none was, the one of least disturbance."""
    found = []
    for _ in range(effort.attempts):
        found.append(sample(system, case, work, effort.new if case.decode else 1))
        if found[-1]["other_load"] <= BUSY:
            break
    return min(found, key=lambda s: float(s["other_load"]))


def sample(system: System, case: Case, work: Workload, new: int) -> dict[str, Any]:
    """One measurement, and what else went on meanwhile."""
    time.sleep(0.3)  # the threads of the system before may still spin
    load = OtherLoad(system.pid)
    found = dict(system.generate(case, work, new))
    tokens = found.pop("tokens")
    if case.decode and len(tokens) < LEAST_DECODED:
        raise envs.RivalError(f"{system.name} ended after {len(tokens)} tokens: too few to time its decoding")
    return {**found, "other_load": load.so_far(), "peak_mb": peak_mb(system.pid)}


# --------------------------------------------------------------------------------------------- rows


def rows_of(everyone: Sequence[System], work: Workload, samples: report.Samples, runs: int) -> list[dict[str, Any]]:
    """Medians, one row a system and case, with ratios to the rivals where both have the row."""
    rows = []
    for system in everyone:
        started = dict(samples.get(start_key(system)) or {})
        started.pop("versions", None)
        of_case = {case: list(_runs_of(system, case, samples, runs)) for case in system.cases}
        peaks = [s["peak_mb"] for found in of_case.values() for s in found if s.get("peak_mb") is not None]
        for case, found in of_case.items():
            medians = {
                name: report.median([s.get(name) for s in found])
                for name in ("ttft_ms", "decode_tokens_per_s", "reused_tokens", "overhead_ms", "other_load")
            }
            rows.append(
                {
                    "system": system.name,
                    "strategy": case.strategy,
                    "state": case.state,
                    "order": case.order,
                    "context_tokens": len(work.of(case)),
                    **medians,
                    "ttft_ms_runs": [s["ttft_ms"] for s in found],
                    "runs": len(found),
                    "peak_mb": max(peaks, default=None),
                    **started,
                }
            )
    return [{**row, **ratios(row, rows)} for row in rows]


def _runs_of(system: System, case: Case, samples: report.Samples, runs: int) -> Iterator[dict[str, Any]]:
    for run in range(runs):
        found = samples.get(f"{system.name}/{case.key}/{run}")
        if found is not None:
            yield found


def ratios(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times faster a row of ours is than a rival's, and than our own full prefill, at the same length."""
    if row["system"] != "ragjax":
        return {}
    found = {}
    for rival in (*RIVALS, "ragjax"):
        base = next((r for r in rows if r["system"] == rival and _comparable(r, row)), None)
        if base is None:
            continue
        found[f"ttft_ratio_{rival}"] = base["ttft_ms"] / row["ttft_ms"]
        if row["decode_tokens_per_s"] and base["decode_tokens_per_s"] and rival != "ragjax":
            found[f"decode_ratio_{rival}"] = row["decode_tokens_per_s"] / base["decode_tokens_per_s"]
    return found


def _comparable(base: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return bool(base["strategy"] == "full" and base["context_tokens"] == row["context_tokens"])


def floors(config: ModelConfig, tokens: int, limits: Mapping[str, float]) -> tuple[float, float]:
    """Least milliseconds for a prefill in bfloat16 at the speed of the best product, and most tokens a second that
    decoding bfloat16 weights at the speed of copying allows.
    """
    shapes = expected_shapes(config)
    head = config.vocab_size * config.hidden_size
    matrices = sum(int(np.prod(s)) for n, s in shapes.items() if len(s) == 2 and n.startswith("model.layers."))
    attention = 2 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
    operations = 2 * matrices * tokens + attention + 2 * head
    return operations / limits["gemm_bf16_gflops"] / 1e6, limits["copy_gb_s"] * 1e9 / (2 * (matrices + head))


def show_ratios(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the ratios, and start-up and memory of each system."""
    ours = [row for row in rows if row["system"] == "ragjax"]
    names = {f"ttft_ratio_{rival}": f"ttft vs {rival}" for rival in RIVALS}
    names["ttft_ratio_ragjax"] = "ttft vs own full"
    names |= {f"decode_ratio_{rival}": f"decode vs {rival}" for rival in RIVALS}
    columns = ("strategy", "state", "order", "context_tokens", *names.values())
    print("\nhow many times faster than (a rival's full prefill at the same length):")
    print(report.table([{**row, **{new: row.get(old) for old, new in names.items()}} for row in ours], columns))
    by_system = {row["system"]: row for row in rows}
    print("\nstart and memory (resident after one warm-up request; peak while serving):")
    print(report.table(list(by_system.values()), SYSTEM_COLUMNS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = report.parser("ttft", __doc__.partition("\n")[0]).parse_args(arguments)
    head = report.header("ttft")
    path = hub.resolve(MODEL).path
    work, config = workload(Tokenizer.load(path)), open_checkpoint(path).config
    least_ms, most_rate = floors(config, len(work.prompt), head.machine["ceilings"])
    print(f"ceiling in bfloat16: {len(work.prompt)} tokens in {least_ms:.0f} ms, {most_rate:.0f} tokens/s decoded")
    effort = QUICK if chosen.quick else Effort()
    settings = {
        "quick": chosen.quick,
        "versions": head.versions,
        "machine": head.machine["cpu"],
        "prompt": hashlib.sha256(work.prompt.tokens.tobytes()).hexdigest(),
        "code": code_digest(),
    }
    samples = report.Samples("ttft", settings)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        everyone = systems(scratch, quick=chosen.quick)
        for system in everyone:
            stack.callback(system.close)
        measure(everyone, work, samples, effort)
    rows = rows_of(everyone, work, samples, effort.runs)
    found = [samples.get(start_key(system)) or {} for system in everyone]
    rivals = {name: version for start in found for name, version in start.get("versions", {}).items()}
    report.finish(replace(head, versions={**head.versions, **rivals}), rows, COLUMNS, chosen.json)
    show_ratios(rows)
    if any(row["other_load"] > BUSY for row in rows):
        print("\nother programs were busy (other_load): repeat this on a quiet machine", file=sys.stderr)
    samples.done()
    return 0


def code_digest() -> str:
    """Digest of the engine's source, so that a stopped run is not continued with other code."""
    whole = hashlib.sha256()
    for file in sorted((envs.HERE.parent / "ragjax").rglob("*.py")):
        whole.update(os.fsencode(file.name) + file.read_bytes())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
