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


def lines(
    rows: Sequence[Row], title: str, x: str, y: str, by: str | Callable[[Row], Any], *, x_label: str = "",
    y_label: str = "", logarithmic: str = "", most: bool = False, least: int = 1,
) -> Panel | None:  # fmt: skip
    """A line for each value of the column `by`, over ascending x; None if no line has `least` points.

    logarithmic: which axes are, "x", "y" or "xy". most: the greatest y of several with one x.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        if r.get(x) is not None and r.get(y) is not None:
            curves.setdefault(str(by(r) if callable(by) else r[by]), []).append((r[x], r[y]))
    curves = {name: sorted(dict(sorted(p)).items() if most else p) for name, p in curves.items() if len(p) >= least}
    if not curves:
        return None

    def panel(axes: Any) -> None:
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
        if "x" in logarithmic:
            axes.set_xscale("log", base=2)
        if "y" in logarithmic:
            axes.set_yscale("log")
        label(axes, title, x_label or x, y_label or y)

    return panel


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
