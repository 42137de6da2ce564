"""What benchmarks share: their flags, the machine and its physical ceiling, samples that outlive a stop, the report.

A benchmark measures samples (one dictionary each), condenses them to rows and hands the rows to `finish`, which prints
the table and, with `--json FILE`, writes `{"benchmark", "command", "machine", "versions", "rows"}`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ragjax.core import ConfigError, RequestError

Row = Mapping[str, Any]

STORE = Path(__file__).parent.parent / "build" / "benchmarks"
"""Where samples of unfinished runs wait to be continued."""

PACKAGES = ("ragjax", "jax", "jaxlib", "flax", "numpy", "ml-dtypes", "faiss-cpu")


def parser(benchmark: str, description: str) -> argparse.ArgumentParser:
    """The flags that every benchmark has; unknown flags and abbreviations are errors."""
    flags = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=description, allow_abbrev=False
    )
    flags.add_argument("--quick", action="store_true", help="a smaller run that ends within two minutes on two cores")
    flags.add_argument("--json", type=_report_file, metavar="FILE", help="also write the report to FILE")
    return flags


def _report_file(text: str) -> Path:
    """A file that may be written; folders above it are made in time."""
    file = Path(text)
    above = next((folder for folder in file.parents if folder.exists()), None)
    if file.is_dir() or (above is not None and not above.is_dir()):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file")
    return file


# ----------------------------------------------------------------------------------------- machine


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at best, whatever program runs on it.

    copy_gb_s: bytes read plus bytes written, in 1e9 a second, by one copying thread a core.
    gemm_*_gflops: the fastest large matrix product through jax, accumulated in float32, in 1e9 operations a second.
    """

    copy_gb_s: float
    gemm_f32_gflops: float
    gemm_bf16_gflops: float


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import jax

    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "devices": [f"{d.platform}: {d.device_kind}" for d in jax.devices()],
    }


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the `packages` that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ceilings() -> Ceilings:
    """Measure the ceilings; takes about two seconds on two cores."""
    import jax.numpy as jnp

    return Ceilings(_copy_rate(), _gemm_rate(jnp.float32), _gemm_rate(jnp.bfloat16))


def _copy_rate(megabytes: int = 128, repeats: int = 5) -> float:
    pairs = [(np.zeros(megabytes << 17), np.ones(megabytes << 17)) for _ in range(cores())]

    def copy_all() -> None:
        with ThreadPoolExecutor(len(pairs)) as pool:
            list(pool.map(lambda pair: np.copyto(*pair), pairs))

    moved = 2 * sum(target.nbytes for target, _ in pairs)
    return moved / _fastest(copy_all, repeats) / 1e9


def _gemm_rate(dtype: Any, size: int = 2048, repeats: int = 5) -> float:
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    a, b = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in range(2))
    return 2 * size**3 / _fastest(lambda: product(a, b).block_until_ready(), repeats) / 1e9


def _fastest(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ----------------------------------------------------------------------------------------- samples


class Samples:
    """Measured samples by key, kept in a file until the benchmark is done, so that a stopped run goes on.

    `settings` is everything the samples depend on; a run with other settings starts from nothing.
    """

    def __init__(self, benchmark: str, settings: Mapping[str, Any], folder: Path | None = None):
        """Open the store, with the samples of an unfinished run of the same settings."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self._path = (folder or STORE) / f"{benchmark}-{digest}.jsonl"
        self._samples = dict(_read_samples(self._path))
        if self._samples:
            print(f"continuing a stopped run: {len(self._samples)} samples are in {self._path}", file=sys.stderr)

    def get(self, key: str) -> dict[str, Any] | None:
        """The sample of `key`, if it is measured."""
        return self._samples.get(key)

    def put(self, key: str, sample: Mapping[str, Any]) -> None:
        """Keep a sample."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as out:
            # begins on a line of its own, also behind one that a stop cut off
            out.write("\n" + json.dumps({"key": key, "sample": dict(sample)}))
        self._samples[key] = dict(sample)

    def done(self) -> None:
        """Forget the samples: the report has been made."""
        self._path.unlink(missing_ok=True)


def weights_of(model: str) -> str:
    """Digest of a model's weights, hexadecimal: its name may stand for others by the time a stopped run goes on.

    Raises:
        ConfigError: if there is no such model.
    """
    from ragjax.models.adapter import model_digest
    from ragjax.models.hub import cache_dir, resolve

    return model_digest(resolve(model), cache_dir()).hex()


def _read_samples(path: Path) -> list[tuple[str, dict[str, Any]]]:
    if not path.exists():
        return []
    found = []
    for line in filter(None, path.read_text().splitlines()):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line that was being written when the run was stopped
        found.append((entry["key"], entry["sample"]))
    return found


@dataclass
class Progress:
    """Says on standard error how far a run is, and when it will be done at the pace so far."""

    total: int
    done: int = 0
    _start: float = field(default_factory=time.monotonic)

    def step(self, what: str) -> None:
        """Count one step that took time; steps that were continued from a file go through `skip`."""
        self.done += 1
        pace = (time.monotonic() - self._start) / self.done
        left = pace * (self.total - self.done)
        print(f"[{self.done}/{self.total}] {what}; about {_duration(left)} left", file=sys.stderr)

    def skip(self) -> None:
        """Leave out one step."""
        self.total -= 1


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are there; None if there are none."""
    there = [v for v in values if v is not None]
    return float(np.median(there)) if there else None


# ------------------------------------------------------------------------------------------ report


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as text in aligned columns; numbers to the right, a dash where a row has nothing."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    numeric = [all(isinstance(r.get(c), int | float | None) for r in rows) for c in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(texts, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


@dataclass(frozen=True)
class Header:
    """Where and with what the figures were measured."""

    benchmark: str
    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


def header(benchmark: str, extra_versions: Mapping[str, str] | None = None) -> Header:
    """Measure the ceilings, print the machine and the ceilings, and hand back both for the report."""
    limits, where = ceilings(), machine()
    print(f"machine: {where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB, {', '.join(where['devices'])}")
    print(
        f"ceiling: memory copy {limits.copy_gb_s:.1f} GB/s, matrix product {limits.gemm_f32_gflops:.0f} GFLOP/s in "
        f"float32, {limits.gemm_bf16_gflops:.0f} GFLOP/s in bfloat16"
    )
    command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
    return Header(benchmark, command, {**where, "ceilings": asdict(limits)}, {**versions(), **(extra_versions or {})})


def measured(
    benchmark: str, columns: Sequence[str], json_file: Path | None, measure: Callable[[Header], Sequence[Row]]
) -> Sequence[Row] | None:
    """Measure and report: the rows, or None after an error of ours, which is one line."""
    head = header(benchmark)
    try:
        rows = measure(head)
    except (ConfigError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    finish(head, rows, columns, json_file)
    return rows


def sampled(
    benchmark: str,
    columns: Sequence[str],
    json_file: Path | None,
    settings: Callable[[Header], Mapping[str, Any]],
    measure: Callable[[Samples], Sequence[Row]],
) -> Sequence[Row] | None:
    """As `measured`, with samples of these settings, which are forgotten once the report is written."""
    opened: list[Samples] = []

    def measure_on(head: Header) -> Sequence[Row]:
        opened.append(Samples(benchmark, settings(head)))
        return measure(opened[0])

    rows = measured(benchmark, columns, json_file, measure_on)
    if rows is not None:
        opened[0].done()
    return rows


def finish(head: Header, rows: Sequence[Row], columns: Sequence[str], json_file: Path | None) -> None:
    """Print the table and write the JSON document if a file is asked for."""
    print("\n" + table(rows, columns))
    if json_file is None:
        return
    json_file.parent.mkdir(parents=True, exist_ok=True)
    document = {**asdict(head), "rows": [dict(row) for row in rows]}
    json_file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    print(f"wrote {json_file}", file=sys.stderr)
