"""What the checks on a GPU share: flags, the device and its ceilings, timing, and rows that are kept as they come.

A check (`kernels`, `peers`, `e2e`) runs on a bare CUDA machine within a budget of seconds: it begins no measurement
after that, writes its report after every row, and goes on where it stopped when it is started again. With
`--platform cpu --quick` it is rehearsed on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import envs, report

ROOT = Path(__file__).parent.parent
BUDGET_S = 470  # a part has nine minutes; the rest is for the start and for the measurement that runs when it is over
PACKAGES = (*report.PACKAGES, "optax", "torch", "transformers", "triton", "jax-triton", "jax-cuda13-plugin")


# ------------------------------------------------------------------------------------------- flags


@dataclass(frozen=True)
class Options:
    """How a check is run. json_file: where the report goes, None to print only."""

    part: str
    platform: str
    quick: bool
    seconds: float
    json_file: Path | None
    out: Path | None


def options(part: str, description: str, arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; unknown flags end the program with exit code 2."""
    flags = report.parser(part, description)
    flags.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (%(default)s)")
    flags.add_argument("--seconds", type=_seconds, default=BUDGET_S, help="begin nothing after that (%(default)s)")
    flags.add_argument("--out", type=Path, metavar="DIR", help="write the report to DIR/<date>-<device>-<part>.json")
    chosen = flags.parse_args(arguments)
    if chosen.out is not None and chosen.json is not None:
        flags.error("--out and --json name the same report: give one of them")
    return Options(part, chosen.platform, chosen.quick, chosen.seconds, chosen.json, chosen.out)


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def choose_platform(chosen: Options, memory_share: float) -> None:
    """Settle platform and share of the GPU's memory before JAX opens the device.

    Raises:
        SystemExit: if there is no GPU and no rehearsal is asked for: JAX alone would go on with the CPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{memory_share:.2f}")
    jax.config.update("jax_platforms", "cuda,cpu" if chosen.platform == "cuda" else "cpu")
    keep_programs()
    try:
        found = jax.devices()[0].platform
    except RuntimeError as error:
        raise SystemExit(f"no CUDA device: {error}\n--platform cpu rehearses without one") from error
    if chosen.platform == "cuda" and found != "gpu":
        raise SystemExit(f"no CUDA device, only {found}; --platform cpu rehearses without one")


def keep_programs() -> None:
    """Keep compiled programs on disk, so that a run which goes on does not compile again."""
    if jax.config.values["jax_compilation_cache_dir"] is None and jax.config.values["jax_platforms"] != "cpu":
        jax.config.update("jax_compilation_cache_dir", str(report.STORE / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# ------------------------------------------------------------------------------------------ timing


def milliseconds(work: Callable[[], Any], *, samples: int = 5, least_s: float = 0.15) -> float:
    """Milliseconds of a call on the device: median over samples, each of many calls enqueued back to back.

    The device is waited for once a sample, so dispatch costs show only where a call is shorter than its dispatch; time
    such calls in a loop within one program (`chained`).
    """
    jax.block_until_ready(work())
    start = time.perf_counter()
    jax.block_until_ready(work())
    once = time.perf_counter() - start
    # more than that in flight would fill the memory with results
    calls = max(1, min(50, math.ceil(least_s / max(once, 1e-9))))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = work()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / calls * 1e3)
    middle = report.median(found)
    assert middle is not None
    return middle


def chained(step: Callable[..., jax.Array], times: int) -> Callable[..., jax.Array]:
    """`times` calls of `step(x, *rest)` in one program, each on the result of the one before."""
    return lambda x, *rest: jax.lax.fori_loop(0, times, lambda _, x: step(x, *rest), x)


COPIES = 20


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at best. copy_gb_s: bytes read plus bytes written, in 1e9 a second.

    product_tflops: of a product of two square bfloat16 matrices, in 1e12 operations a second.
    """

    copy_gb_s: float
    product_tflops: float


def ceilings(quick: bool) -> Ceilings:
    """Measure the ceilings: a product of 8192 cubed, a copy of 2 GiB."""
    size, words = (512, 1 << 20) if quick else (8192, 1 << 29)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.dot)
    product_ms = milliseconds(lambda: product(a, b))
    source = jnp.zeros(words, jnp.uint32)
    # reads and writes every word; a bare copy may be left out
    copy = jax.jit(chained(lambda x: x ^ jnp.uint32(1), COPIES))
    copy_ms = milliseconds(lambda: copy(source)) / COPIES
    return Ceilings(2 * source.nbytes / copy_ms / 1e6, 2 * size**3 / product_ms / 1e9)


# ------------------------------------------------------------------------------------------ report


def header(chosen: Options, limits: Ceilings, arguments: Sequence[str] | None = None) -> report.Header:
    """Print the machine and the ceilings, and hand back both for the report."""
    device = jax.devices()[0]
    where = {
        **report.machine(),
        "capability": str(getattr(device, "compute_capability", "")),
        "driver": _driver() if device.platform == "gpu" else "",
        "ceilings": asdict(limits),
    }
    print(f"machine: {device.device_kind}, {where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB")
    print(
        f"ceiling: bfloat16 product {limits.product_tflops:.4g} TFLOP/s, copy {limits.copy_gb_s:.4g} GB/s "
        "(read and written)"
    )
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"benchmarks.{chosen.part}", *words])
    return report.Header(chosen.part, command, where, versions())


def versions() -> dict[str, str]:
    """Versions of what is installed; ragjax's own from pyproject.toml where it is not installed."""
    found = report.versions(PACKAGES)
    project = ROOT / "pyproject.toml"
    if "ragjax" not in found and project.exists():
        found["ragjax"] = tomllib.loads(project.read_text())["project"]["version"]
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def result_file(chosen: Options) -> Path | None:
    """Where the report goes."""
    if chosen.out is None:
        return chosen.json_file
    kind = jax.devices()[0].device_kind.lower().replace("nvidia", "")
    device = re.sub(r"[^a-z0-9]+", "-", kind).strip("-") or "device"
    return chosen.out / f"{date.today().isoformat()}-{device}-{chosen.part}.json"


class Clock:
    """What is left of a budget of seconds."""

    def __init__(self, seconds: float):
        """Begin."""
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, negative when the budget is used up."""
        return self._end - time.monotonic()


class Record:
    """Rows of a check by key: measured once, written as they come, found again by a run that goes on.

    rows: in the order in which they were asked for. skipped: keys there was no time for. failed: keys whose
    measurement raised; these are tried again by the next run.
    """

    def __init__(self, chosen: Options, head: report.Header, clock: Clock):
        """Open the samples of an unfinished run of the same settings, code and machine."""
        self.head, self.clock = head, clock
        self.rows: dict[str, report.Row] = {}
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self._file = result_file(chosen)
        settings = {
            "platform": chosen.platform,
            "quick": chosen.quick,
            "device": jax.devices()[0].device_kind,
            "versions": dict(head.versions),
            "code": code_digest(),
        }
        self._samples = report.Samples(chosen.part, settings, report.STORE)

    def has(self, key: str) -> bool:
        """Whether a row was measured by the run that is gone on with."""
        return self._samples.get(key) is not None

    def row(self, key: str, known: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> report.Row | None:
        """The row `known | measure()`, from the store if it is there; None if there is no time or it failed."""
        found = self._samples.get(key)
        if found is None and self.clock.left <= 0:
            self.skipped.append(key)
            return None
        if found is None:
            began = time.monotonic()
            try:
                found = plain({**known, **measure()})
            except Exception as error:
                words = f"{type(error).__name__}: {error}"[:500]
                print(f"{key} failed: {words}", file=sys.stderr, flush=True)
                self.failed.append(key)
                self.rows[key] = plain({**known, "failed": words})
                self.write()
                return None
            self._samples.put(key, found)
            print(f"{key}: {time.monotonic() - began:.1f} s; {self.clock.left:.0f} s left", file=sys.stderr, flush=True)
        self.rows[key] = found
        self.write()
        return found

    def write(self, more: Sequence[report.Row] = ()) -> None:
        """Write the report as it is now, with `more` rows at its end."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(report_text(self.head, [*self.rows.values(), *more]))
        part.replace(self._file)

    def finish(self, more: Sequence[report.Row] = ()) -> None:
        """Write the report for good; an unfinished one keeps its samples."""
        self.write(more)
        if self._file is not None:
            print(f"wrote {self._file}", file=sys.stderr)
        if self.skipped:
            names = ", ".join(self.skipped[:8]) + (", …" if len(self.skipped) > 8 else "")
            print(f"\nno time for {len(self.skipped)} measurements ({names}): start again to go on with them")
        elif not self.failed:
            self._samples.done()


def report_text(head: report.Header, rows: Sequence[report.Row]) -> str:
    """The JSON document."""
    return json.dumps({**asdict(head), "rows": [dict(row) for row in rows]}, indent=1, allow_nan=False) + "\n"


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row in JSON's types: NumPy scalars as Python's, figures that are not finite as text."""
    out = {}
    for name, value in row.items():
        value = value.item() if hasattr(value, "item") else value
        out[name] = str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return out


def code_digest() -> str:
    """Digest of the sources that a figure depends on."""
    whole = hashlib.sha256()
    files = [
        *(ROOT / "ragjax").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        ROOT / "tests" / "support" / "oracle.py",
    ]
    for file in sorted(f for f in files if ".envs" not in f.parts):
        whole.update(os.fsencode(file.name) + file.read_bytes())
    return whole.hexdigest()


def on_gpu() -> bool:
    """Whether figures are a GPU's."""
    return bool(jax.devices()[0].platform == "gpu")


def gate(name: str, wanted: str, measured: float | None, passed: Callable[[float], bool], text: str = "") -> report.Row:
    """A row that says whether a target is met; `passed` is None where the figure is missing, or is no GPU's."""
    verdict = bool(passed(measured)) if measured is not None and on_gpu() else None
    return {"case": "gate", "gate": name, "wanted": wanted, "measured": measured, "passed": verdict, "note": text}


def show_gates(gates: Sequence[report.Row]) -> None:
    """Print which targets are met."""
    words = {True: "pass", False: "FAIL", None: "not judged"}
    print("\ntargets (H200):")
    told = [{**g, "verdict": words[g["passed"]]} for g in gates]
    print(report.table(told, ("gate", "wanted", "measured", "verdict", "note")))


# --------------------------------------------------------------------------------------------- rivals


class Rival:
    """A worker with PyTorch that is started when it is first asked, and anew after it had to be ended."""

    def __init__(self, script: str, interpreter: str | None = None):
        """Nothing is started yet."""
        self._script, self._interpreter = script, interpreter
        self._worker: envs.Worker | None = None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Ask the worker; it is ended if it takes longer than `seconds`.

        Raises:
            RivalError: if there is no PyTorch, or the worker fails or is ended.
        """
        if self._worker is None:
            interpreter = self._interpreter or torch_python()
            if interpreter is None:
                raise envs.RivalError("PyTorch is not installed here")
            # kept as it is: what is installed may be found by it alone
            paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            self._worker = envs.Worker([interpreter, envs.WORKERS / self._script], paths)
        timer = threading.Timer(max(seconds, 1.0), os.kill, (self._worker.pid, signal.SIGKILL))
        timer.start()
        try:
            return self._worker.ask(request)
        except envs.RivalError as error:
            if "the worker ended" in str(error):
                self.close()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the worker, if it runs."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def torch_python() -> str | None:
    """An interpreter that has PyTorch: this one, or that of the rival's environment if it was made before."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    made = envs.HOMES / "transformers" / "bin" / "python"
    return str(made) if made.exists() else None
