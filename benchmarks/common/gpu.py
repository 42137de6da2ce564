"""What the checks on a GPU share: flags, a budget of seconds, rows that are kept as they come, targets, rivals.

A check (`kernels`, `served`, `e2e`, `mesh`) runs on a bare CUDA machine within a budget of seconds: it begins no
measurement after that, writes its report after every row, and goes on where it stopped when it is started again. With
`--platform cpu --quick` it is rehearsed on a machine without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import jax

from benchmarks.common import envs, report, samples
from benchmarks.common.machine import on_gpu


def choose_platform(chosen: Namespace, memory_share: float) -> None:
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
        jax.config.update("jax_compilation_cache_dir", str(samples.STORE / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def result_file(part: str, chosen: Namespace) -> Path | None:
    if chosen.out is None:
        file: Path | None = chosen.json
        return file
    kind = jax.devices()[0].device_kind.lower().replace("nvidia", "")
    device = re.sub(r"[^a-z0-9]+", "-", kind).strip("-") or "device"
    folder: Path = chosen.out
    return folder / f"{date.today().isoformat()}-{device}-{part}.json"


class Clock:
    """What is left of a budget of seconds."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Record:
    """Rows of a check by key: measured once, written as they come, found again by a run that goes on.

    rows: in the order in which they were asked for. skipped: keys there was no time for. failed: keys whose
    measurement raised; these are tried again by the next run.
    """

    def __init__(self, chosen: Namespace, head: report.Header, clock: Clock):
        """Open the samples of an unfinished run of the same settings, code and machine."""
        self.head, self.clock = head, clock
        self.rows: dict[str, report.Row] = {}
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self._file = result_file(head.benchmark, chosen)
        settings = {
            "platform": chosen.platform, "quick": chosen.quick, "device": jax.devices()[0].device_kind,
            "versions": dict(head.versions),
        }  # fmt: skip
        self._samples = samples.Samples(head.benchmark, settings)

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
                found = report.plain({**known, **measure()})
            except Exception as error:
                words = f"{type(error).__name__}: {error}"[:500]
                print(f"{key} failed: {words}", file=sys.stderr, flush=True)
                self.failed.append(key)
                self.rows[key] = report.plain({**known, "failed": words})
                self.write()
                return None
            self._samples.put(key, found)
            print(f"{key}: {time.monotonic() - began:.1f} s; {self.clock.left:.0f} s left", file=sys.stderr, flush=True)
        self.rows[key] = found
        self.write()
        return found

    def write(self, more: Sequence[report.Row] = ()) -> None:
        if self._file is not None:
            report.write(self._file, self.head, [*self.rows.values(), *more])

    def replace(self, change: Callable[[Sequence[report.Row]], Sequence[report.Row]]) -> Sequence[report.Row]:
        self.rows = {str(i): row for i, row in enumerate(change(list(self.rows.values())))}
        return list(self.rows.values())

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Goes on behind the block after an interrupt."""
        try:
            yield
        except KeyboardInterrupt:
            print("stopped: what was measured so far follows", file=sys.stderr)
            self.skipped.append("what was left when it was stopped")

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


def parse(part: str, about: str | None, arguments: Sequence[str] | None) -> Namespace:
    """The parsed command line; wrong flags end the program with exit code 2."""
    flags = report.Parser(part, about)
    flags.add_gpu()
    chosen = flags.parse(arguments)
    if chosen.out is not None and chosen.json is not None:
        flags.error("--out and --json name the same report: give one of them")
    return chosen


def begin(
    part: str, about: str | None, arguments: Sequence[str] | None, memory_share: float
) -> tuple[Namespace, Record]:
    """Read the command line, open the device, measure and print its ceilings; the check's record."""
    chosen = parse(part, about, arguments)
    clock = Clock(chosen.seconds)
    choose_platform(chosen, memory_share)
    return chosen, Record(chosen, report.header(part, arguments), clock)


def conclude(
    record: Record, change: Callable[[Sequence[report.Row]], Sequence[report.Row]], columns: Sequence[str]
) -> int:
    """Put what `change` makes of the rows in their place, print and write them; the exit code."""
    print("\nmedians:\n" + report.table(record.replace(change), columns))
    record.finish()
    return 1 if record.failed else 0


def gate(name: str, wanted: str, measured: float | None, passed: Callable[[float], bool], text: str = "") -> report.Row:
    """A row that says whether a target is met; `passed` is None where the figure is missing, or is no GPU's."""
    verdict = bool(passed(measured)) if measured is not None and on_gpu() else None
    return {"case": "gate", "gate": name, "wanted": wanted, "measured": measured, "passed": verdict, "note": text}


def show_gates(gates: Sequence[report.Row]) -> None:
    words = {True: "pass", False: "FAIL", None: "not judged"}
    print("\ntargets (H200):")
    told = [{**g, "verdict": words[g["passed"]]} for g in gates]
    print(report.table(told, ("gate", "wanted", "measured", "verdict", "note")))


class Rival:
    """A worker with PyTorch that is started when it is first asked, and again after it had to be ended."""

    def __init__(self, script: str, interpreter: str | None = None):
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
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def torch_python() -> str | None:
    """An interpreter that has PyTorch: this one, or that of the rival's environment if it was made before."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    made = envs.HOMES / "transformers" / "bin" / "python"
    return str(made) if made.exists() else None
