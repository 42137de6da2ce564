"""Time to the first token of a retrieval-augmented prompt, and decode speed, beside three others.

The others are transformers, llama.cpp and OpenVINO GenAI. OpenVINO reads the packaged file, has its prefix cache off,
and is asked for bfloat16 where XLA may use it, else for float32 (stored with its version); how it quantises activations
and KV is its own choice. XLA_FLAGS=--xla_cpu_max_isa=AVX2, which imitates an older CPU, limits ragjax alone.

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
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.envs import RivalError
from benchmarks.common.machine import Ceilings, median
from benchmarks.common.report import Benchmark, Session
from benchmarks.common.samples import Progress, Samples
from benchmarks.latency.prompt import Case, Workload, workload
from benchmarks.latency.system import OtherLoad, System, peak_mb, reset_peak, systems
from ragjax.models import hub
from ragjax.models.config import ModelConfig
from ragjax.models.tensors import expected_shapes
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint

BUSY = 0.25  # cores kept busy by others, above which a figure is worth little
LEAST_DECODED = 9  # fewer tokens than this say nothing about decode speed

COLUMNS: tuple[str, ...] = ("system", "strategy", "state", "order", "context_tokens", "ttft_ms", "decode_tokens_per_s")
COLUMNS += ("reused_tokens", "overhead_ms", "peak_mb", "runs", "other_load")
SYSTEM_COLUMNS: tuple[str, ...] = ("system", "first_start_s", "start_s", "startup_peak_mb", "resident_mb", "peak_mb")
RIVALS = ("transformers-bf16", "llama.cpp-q4_0", "openvino")  # whom our rows are compared with


@dataclass(frozen=True)
class Effort:
    """How much is measured: runs of each case, tokens decoded, attempts at a sample while others are busy."""

    runs: int = 5
    new: int = 65
    attempts: int = 3


QUICK = Effort(3, 17, 1)


def measure(everyone: Sequence[System], work: Workload, samples: Samples, effort: Effort) -> None:
    """Fill `samples`: rounds over all systems and cases, each round beginning with another system."""
    runs = effort.runs
    progress = Progress(runs * sum(len(system.cases) for system in everyone))
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


def make_ready(system: System, work: Workload, samples: Samples) -> None:
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
        raise RivalError(f"{system.name} ended after {len(tokens)} tokens: too few to time its decoding")
    return {**found, "other_load": load.so_far(), "peak_mb": peak_mb(system.pid)}


def rows_of(everyone: Sequence[System], work: Workload, samples: Samples, runs: int) -> list[dict[str, Any]]:
    """Medians, one row a system and case, with ratios to the rivals where both have the row."""
    rows = []
    for system in everyone:
        started = dict(samples.get(start_key(system)) or {})
        started.pop("versions", None)
        of_case = {case: list(_runs_of(system, case, samples, runs)) for case in system.cases}
        peaks = [s["peak_mb"] for found in of_case.values() for s in found if s.get("peak_mb") is not None]
        for case, found in of_case.items():
            medians = {
                name: median([s.get(name) for s in found])
                for name in ("ttft_ms", "decode_tokens_per_s", "reused_tokens", "overhead_ms", "other_load")
            }
            rows.append({
                "system": system.name, "strategy": case.strategy, "state": case.state, "order": case.order,
                "context_tokens": len(work.of(case)), **medians, "ttft_ms_runs": [s["ttft_ms"] for s in found],
                "runs": len(found), "peak_mb": max(peaks, default=None), **started,
            })  # fmt: skip
    return [{**row, **ratios(row, rows)} for row in rows]


def _runs_of(system: System, case: Case, samples: Samples, runs: int) -> Iterator[dict[str, Any]]:
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


def floors(config: ModelConfig, tokens: int, limits: Ceilings) -> tuple[float, float]:
    """Least milliseconds for a prefill in bfloat16 at the speed of the best product, and most tokens a second that
    decoding bfloat16 weights at the speed of copying allows.
    """
    shapes = expected_shapes(config)
    head = config.vocab_size * config.hidden_size
    matrices = sum(int(np.prod(s)) for n, s in shapes.items() if len(s) == 2 and n.startswith("model.layers."))
    attention = 2 * tokens**2 * config.num_heads * config.head_dim * config.num_layers
    operations = 2 * matrices * tokens + attention + 2 * head
    return operations / limits.gemm_bf16_gflops / 1e6, limits.copy_gb_s * 1e9 / (2 * (matrices + head))


def show_ratios(rows: Sequence[Mapping[str, Any]]) -> None:
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


def measured(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    quick = chosen.quick
    path = hub.resolve(report.MODEL).path
    work, config = workload(Tokenizer.load(path)), open_checkpoint(path).config
    least_ms, most_rate = floors(config, len(work.prompt), session.head.ceilings)
    print(f"ceiling in bfloat16: {len(work.prompt)} tokens in {least_ms:.0f} ms, {most_rate:.0f} tokens/s decoded")
    effort = QUICK if quick else Effort()
    digest = hashlib.sha256(work.prompt.tokens.tobytes()).hexdigest()
    samples = session.samples({"quick": quick, "prompt": digest})
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        everyone = systems(scratch, quick=quick)
        for system in everyone:
            stack.callback(system.close)
        measure(everyone, work, samples, effort)
    for system in everyone:
        session.add_versions((samples.get(start_key(system)) or {}).get("versions", {}))
    return rows_of(everyone, work, samples, effort.runs)


def show(rows: Sequence[Mapping[str, Any]], _: Namespace) -> None:
    """Print the ratios, and whether the machine was quiet."""
    show_ratios(rows)
    if any(row["other_load"] > BUSY for row in rows):
        print("\nother programs were busy (other_load): repeat this on a quiet machine", file=sys.stderr)


main = Benchmark("ttft", __doc__, COLUMNS, measured, show=show).main

if __name__ == "__main__":
    sys.exit(main())
