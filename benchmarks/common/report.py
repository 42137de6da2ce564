"""A command's flags and its report.

A benchmark measures samples (one dictionary each), condenses them to rows and hands them to the report, which is a
table and, with `--json FILE`, a document `{"benchmark", "command", "machine", "versions", "rows"}`.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.envs import RivalError
from benchmarks.common.machine import Ceilings, ceilings, machine, versions
from benchmarks.common.samples import Samples, weights_of
from ragjax.commands.flags import positive
from ragjax.core import RagjaxError
from ragjax.core.file import atomic_path

Row = Mapping[str, Any]

MODEL = "smollm2-135m-instruct"


class Parser(argparse.ArgumentParser):
    """Flags of a command. Unknown flags and abbreviations are errors; help names each flag's defaults."""

    def __init__(self, benchmark: str, about: str | None):
        """about: the command's docstring; its first line is shown."""
        first = (about or "").partition("\n")[0]
        super().__init__(prog=f"python -m benchmarks.{benchmark}", description=first, allow_abbrev=False)
        self._quick: dict[str, tuple[Any, Any]] = {}
        self.add("--quick", action="store_true", help="a smaller run that ends within two minutes on two cores")
        self.add("--json", type=writable, metavar="FILE", help="also write the report to FILE")

    def add(self, flag: str, *, default: Any = None, quick: Any = None, help: str = "", **more: Any) -> None:
        """Add a flag. quick: its default in a run with --quick, if that is another one."""
        told = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
        if quick is not None:
            told = f"{told}; {','.join(map(str, quick)) if isinstance(quick, list | tuple) else quick} with --quick"
            self._quick[flag.lstrip("-").replace("-", "_")] = (default, quick)
        more |= {} if quick is not None or default is None else {"default": default}
        super().add_argument(flag, help=help if told in (None, "") else f"{help} ({told})", **more)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        chosen = self.parse_args(arguments)
        for name, (full, quick) in self._quick.items():
            if getattr(chosen, name) is None:
                setattr(chosen, name, quick if chosen.quick else full)
        return chosen

    def add_model(self) -> None:
        self.add("--model", default=MODEL, metavar="NAME_OR_PATH", help="model")
        self.add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of weights and KV")

    def add_gpu(self) -> None:
        """Add what the checks on a GPU have: --platform, --seconds and --out."""
        self.add("--platform", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
        self.add("--seconds", type=positive, default=470, help="begin no measurement after that")
        self.add("--out", type=Path, metavar="DIR", help="write the report to DIR/<date>-<device>-<part>.json")


def writable(text: str) -> Path:
    """A file that may be written; folders above it are made in time."""
    file = Path(text)
    above = next((folder for folder in file.parents if folder.exists()), None)
    if file.is_dir() or (above is not None and not above.is_dir()):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file")
    return file


def existing_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {text}")
    return Path(text)


def among(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",") if text else []
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; choose among {', '.join(known)}")
        return names

    return parse


Number = TypeVar("Number", int, float)


def listed(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not names:
        raise argparse.ArgumentTypeError("name one at least")
    return names


def numbers(kind: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    def parse(text: str) -> list[Number]:
        return [kind(one) for one in text.split(",")]

    return parse


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

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(**self.machine["ceilings"])


def header(benchmark: str, arguments: Sequence[str] | None = None) -> Header:
    """Measure the ceilings, print the machine and the ceilings, and hand back both for the report.

    arguments: of the command line, `sys.argv`'s unless they are given.
    """
    limits, where = ceilings(), machine()
    print(f"machine: {where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB, {', '.join(where['devices'])}")
    print(
        f"ceiling: memory copy {limits.copy_gb_s:.1f} GB/s, matrix product {limits.gemm_f32_gflops:.0f} GFLOP/s in "
        f"float32, {limits.gemm_bf16_gflops:.0f} GFLOP/s in bfloat16"
    )
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *words])
    return Header(benchmark, command, {**where, "ceilings": asdict(limits)}, versions())


def write(file: Path, head: Header, rows: Sequence[Row], tables: Mapping[str, Sequence[Row]] | None = None) -> None:
    """Write the JSON document, as a whole or not at all.

    tables: what does not fit into the rows, by name.

    Raises:
        ValueError: if a figure is not finite.
    """
    more = {name: [dict(row) for row in kept] for name, kept in (tables or {}).items() if kept}
    text = json.dumps({**asdict(head), "rows": [dict(row) for row in rows], **more}, indent=1, allow_nan=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file) as part:
        part.write_text(text + "\n")


def plain(row: Row) -> dict[str, Any]:
    """The row in JSON's types: NumPy scalars as Python's, figures that are not finite as text."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    return {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}


class Session:
    """One run of a command: its header, and the samples that it keeps until the report is written.

    tables: rows of other columns, by name, printed and written behind the report's.
    """

    def __init__(self, benchmark: str, chosen: argparse.Namespace | None = None):
        """Measure the ceilings and print them."""
        self.head = header(benchmark)
        self.tables: dict[str, Sequence[Row]] = {}
        self._chosen = chosen or argparse.Namespace()
        self._opened: list[Samples] = []

    def add_versions(self, versions: Mapping[str, str]) -> None:
        self.head = replace(self.head, versions={**self.head.versions, **versions})

    def samples(self, settings: Mapping[str, Any] | None = None) -> Samples:
        """Open the samples of these settings (the command line's) on this machine with these versions."""
        if settings is None:
            given = {name: str(value) for name, value in vars(self._chosen).items() if name != "json"}
            settings = given | ({"weights": weights_of(self._chosen.model)} if "model" in given else {})
        where = {"machine": self.head.machine["cpu"], "versions": dict(self.head.versions)}
        self._opened.append(Samples(self.head.benchmark, {**where, **settings}))
        return self._opened[-1]

    def finish(self, rows: Sequence[Row], columns: Sequence[str], file: Path | None) -> None:
        print("\n" + table(rows, columns))
        for name, kept in self.tables.items():
            if kept:
                print(f"\n{name}:\n{table(kept, list(kept[0]))}")
        if file is not None:
            write(file, self.head, rows, self.tables)
            print(f"wrote {file}", file=sys.stderr)
        for samples in self._opened:
            samples.done()


@dataclass(frozen=True)
class Benchmark:
    """A command: its flags, the rows that it measures, the columns that it prints."""

    name: str
    about: str | None  # the module's docstring
    columns: Sequence[str] | Callable[[argparse.Namespace], Sequence[str]]
    rows: Callable[[argparse.Namespace, Session], Iterable[Row]]
    flags: Callable[[Parser], object] = lambda flags: None
    model: bool = False  # whether it has --model and --dtype
    check: Callable[[Parser, argparse.Namespace], object] = lambda flags, chosen: None  # refuses flags that contradict
    show: Callable[[Sequence[Row], argparse.Namespace], object] = lambda rows, chosen: None  # prints more; True: failed

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The parsed command line; wrong flags end the program with exit code 2."""
        flags = Parser(self.name, self.about)
        if self.model:
            flags.add_model()
        self.flags(flags)
        chosen = flags.parse(arguments)
        self.check(flags, chosen)
        return chosen

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command line; the exit code: 1 after an error of ours or a rival's, which is one line."""
        chosen = self.parse(arguments)
        try:
            session = Session(self.name, chosen)
            rows = list(self.rows(chosen, session))
        except (RagjaxError, RivalError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        session.finish(rows, self.columns(chosen) if callable(self.columns) else self.columns, chosen.json)
        return int(bool(self.show(rows, chosen)))
