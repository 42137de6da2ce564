"""Figures of a report's rows: panels side by side in one picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Panel = Callable[[Any], None]  # draws on the axes it is given
Panels = Callable[[Sequence[Row]], Iterator[Panel]]
Figures = Mapping[str, tuple[str, Panels]]  # by file name: title, and what makes its panels of the rows
ACROSS = 4  # panels in a line of a picture


def draw(rows: Sequence[Row], folder: Path | None, figures: Figures) -> None:
    """Write those of the figures that the rows have data for; none without a folder."""
    if folder is None:
        return
    for name, (title, panels) in figures.items():
        found = list(panels(rows))
        if found:
            save(found, folder / f"{name}.png", title)


def save(panels: Sequence[Panel], file: Path, title: str = "") -> None:
    from matplotlib.figure import Figure

    across, down = min(len(panels), ACROSS), -(-len(panels) // ACROSS)
    picture = Figure(figsize=(5 * across, 4 * down), layout="tight")
    for place, panel in enumerate(panels, 1):
        panel(picture.add_subplot(down, across, place))
    picture.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=120)
    print(f"wrote {file}", file=sys.stderr)


def bars(rows: Sequence[Row], title: str, y: str, labels: Sequence[str] | None = None) -> Panel | None:
    """A bar for each row that has a value, with its interval; None if none has."""
    names = labels or [r["strategy"] for r in rows]
    kept = [(r, label) for r, label in zip(rows, names, strict=True) if r.get(y) is not None]
    if not kept:
        return None

    def panel(axes: Any) -> None:
        gaps = zip(*(_gaps(r, y) for r, _ in kept), strict=True)
        axes.bar(range(len(kept)), [r[y] for r, _ in kept], yerr=[list(side) for side in gaps], capsize=3)
        axes.set_xticks(range(len(kept)), [label for _, label in kept], rotation=30, ha="right", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel(y.replace("_", " "))

    return panel


def _gaps(r: Row, y: str) -> tuple[float, float]:
    """From the value down and up to its bounds; 0 where there is none."""
    low, high = r.get(f"{y}_lo"), r.get(f"{y}_hi")
    return (0.0 if low is None else max(0.0, r[y] - low)), (0.0 if high is None else max(0.0, high - r[y]))


def label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))
    axes.legend(fontsize=6)
