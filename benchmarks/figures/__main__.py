"""Figures of FusionRAG and Cache-Craft, measured on a small model, one command each.

The docstring of the figure's module says what the paper measures and what is measured here. `--rows` measures nothing
and draws the rows of a stored report: of this command, of another figure that shares the measurement, or of
`benchmarks.quality`. `--list` also names the figures that other commands draw.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import plot, report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.figures.base import Figure, Setup
from benchmarks.figures.catalogue import ELSEWHERE, FIGURES
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import ConfigError


def options(flags: Parser) -> None:
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", choices=tuple(FIGURES), metavar="NAME", help="which figure (--list names them)")
    what.add_argument("--list", action="store_true", help="say which figures there are, and measure nothing")
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    flags.add("--limit", type=integer(1), metavar="N", help="questions a set (the figure's own)")
    flags.add("--rows", type=report.existing_file, metavar="FILE", help="draw the rows of a stored report")
    flags.add("--plot", type=report.writable, metavar="FILE.png", help="also draw the figure")


def check(flags: Parser, chosen: Namespace) -> None:
    if chosen.list:
        return
    figure = FIGURES[chosen.figure]
    if chosen.rows is not None:
        if chosen.plot is None or any((chosen.data, chosen.limit, chosen.json, chosen.quick)):
            flags.error("--rows goes with --figure and --plot alone: it measures nothing")
    elif figure.reads_data and chosen.data is None:
        flags.error(f"{chosen.figure} reads questions: give --data DIR, or --rows FILE with a stored report")
    elif not figure.reads_data and chosen.data is not None:
        flags.error(f"{chosen.figure} reads no data: leave out --data")
    chosen.limit = chosen.limit or (figure.quick if chosen.quick else figure.limit)


def listing() -> str:
    """Every figure of the papers that a command draws."""
    own = [(name, f"{figure.paper}: {figure.shows}") for name, figure in FIGURES.items()]
    lines = ["python -m benchmarks.figures --figure NAME:"]
    lines += [f"  {name:<14} {text}" for name, text in own]
    lines += ["", "other commands:"]
    lines += [f"  {name:<23} python -m benchmarks.{command}" for name, command in ELSEWHERE.items()]
    return "\n".join(lines)


def stored(file: Path) -> list[dict[str, Any]]:
    """The rows of a report.

    Raises:
        ConfigError: if the file is none.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no report with rows: {type(error).__name__}: {error}") from error
    return list(rows)


def draw(figure: Figure, rows: Sequence[report.Row], file: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: if the rows have nothing of the figure.
    """
    panels = figure.panels(rows)
    if not panels:
        raise ConfigError(f"the rows have nothing for {figure.paper}")
    plot.save(panels, file, f"{figure.paper}: {figure.shows}" if len(panels) > 1 else figure.paper)


def redraw(chosen: Namespace) -> int:
    """Draw a stored report; returns the exit code."""
    try:
        draw(FIGURES[chosen.figure], stored(chosen.rows), chosen.plot)
    except (ConfigError, KeyError) as error:
        print(f"error: {chosen.rows} is no report of {chosen.figure}: {error}", file=sys.stderr)
        return 1
    return 0


def measure(chosen: Namespace, session: Session) -> Sequence[report.Row]:
    setup = Setup(
        chosen.data, chosen.model, chosen.dtype, chosen.limit, session.samples(), chosen.quick, packaged_encoder
    )
    return FIGURES[chosen.figure].measure(setup)


def show(rows: Sequence[report.Row], chosen: Namespace) -> None:
    figure = FIGURES[chosen.figure]
    print(f"\n{figure.paper}: {figure.shows}\nnot as in the paper: {figure.differs}")
    if figure.timed:
        print("times are those of this machine as busy as it was")
    if chosen.plot is not None:
        draw(figure, rows, chosen.plot)


BENCHMARK = Benchmark(
    "figures", __doc__, lambda chosen: FIGURES[chosen.figure].columns, measure, options, model=True, check=check,
    show=show,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = BENCHMARK.parse(arguments)
    if chosen.list:
        print(listing())
        return 0
    return BENCHMARK.main(arguments) if chosen.rows is None else redraw(chosen)


if __name__ == "__main__":
    sys.exit(main())
