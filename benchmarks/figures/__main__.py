"""Figures of FusionRAG and Cache-Craft, measured on a small model, one command each.

    python -m benchmarks.figures --list
    python -m benchmarks.figures --figure NAME --data DIR [--quick] [--limit N] [--model M] [--dtype D]
        [--json FILE] [--plot FILE.png]
    python -m benchmarks.figures --figure NAME --rows REPORT.json [--plot FILE.png]

The docstring of the figure's module says what the paper measures and what is measured here. `--rows` measures nothing
and draws the rows of a stored report: of this command, of another figure that shares the measurement, or of
`benchmarks.quality`. `--list` also names the figures that other commands draw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import plot, report
from benchmarks.common.samples import weights_of
from benchmarks.figures.base import Figure, Setup
from benchmarks.figures.catalogue import ELSEWHERE, FIGURES
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import ConfigError


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    flags = report.parser("figures", __doc__)
    report.add_model(flags)
    add = flags.add_argument
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", choices=tuple(FIGURES), metavar="NAME", help="which figure (--list names them)")
    what.add_argument("--list", action="store_true", help="say which figures there are, and measure nothing")
    add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    add("--limit", type=integer(1), metavar="N", help="questions a set (the figure's own)")
    add("--rows", type=report.existing_file, metavar="FILE", help="draw the rows of a stored report")
    add("--plot", type=report.writable, metavar="FILE.png", help="also draw the figure")
    chosen = flags.parse_args(arguments)
    if chosen.list:
        return chosen
    figure = FIGURES[chosen.figure]
    if chosen.rows is not None:
        if chosen.plot is None or any((chosen.data, chosen.limit, chosen.json, chosen.quick)):
            flags.error("--rows goes with --figure and --plot alone: it measures nothing")
    elif figure.reads_data and chosen.data is None:
        flags.error(f"{chosen.figure} reads questions: give --data DIR, or --rows FILE with a stored report")
    elif not figure.reads_data and chosen.data is not None:
        flags.error(f"{chosen.figure} reads no data: leave out --data")
    return chosen


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


def redraw(chosen: argparse.Namespace) -> int:
    """Draw a stored report; returns the exit code."""
    try:
        draw(FIGURES[chosen.figure], stored(chosen.rows), chosen.plot)
    except (ConfigError, KeyError) as error:
        print(f"error: {chosen.rows} is no report of {chosen.figure}: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = options(arguments)
    if chosen.list:
        print(listing())
        return 0
    if chosen.rows is not None:
        return redraw(chosen)
    figure = FIGURES[chosen.figure]
    limit = chosen.limit or (figure.quick if chosen.quick else figure.limit)

    def measure(session: report.Session) -> Sequence[report.Row]:
        settings = {"figure": chosen.figure, "limit": limit, "quick": chosen.quick, "dtype": chosen.dtype}
        samples = session.samples({**settings, "data": str(chosen.data), "model": weights_of(chosen.model)})
        return figure.measure(
            Setup(chosen.data, chosen.model, chosen.dtype, limit, samples, chosen.quick, packaged_encoder)
        )

    def show(rows: Sequence[report.Row]) -> None:
        print(f"\n{figure.paper}: {figure.shows}\nnot as in the paper: {figure.differs}")
        if figure.timed:
            print("times are those of this machine as busy as it was")
        if chosen.plot is not None:
            draw(figure, rows, chosen.plot)

    return report.run("figures", figure.columns, chosen.json, measure, show)


if __name__ == "__main__":
    sys.exit(main())
