"""The figure of the README, drawn from the newest stored reports of `ttft`, `repair` and `quality`.

    python -m benchmarks.plot_readme

It writes docs/figure/overview.svg: the same reports give the same file. In a dark page its text is light.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common.machine import ROOT
from benchmarks.common.report import MODEL, Row

RESULTS = ROOT / "benchmarks" / "results"
FILE = ROOT / "docs" / "figure" / "overview.svg"
INK, LIGHT, OURS, OTHERS = "#24292f", "#e6edf3", "#2f81f7", "#8b949e"
DARK = (
    f'<style>@media (prefers-color-scheme: dark) {{ [style*="fill: {INK}"] {{ fill: {LIGHT} !important }} '
    f'[style*="stroke: {INK}"] {{ stroke: {LIGHT} !important }} }}</style>'
)
BARS = (
    ("llama.cpp, Q4_0", "llama.cpp-q4_0", "full", "same"),
    ("transformers, bfloat16", "transformers-bf16", "full", "same"),
    ("OpenVINO GenAI", "openvino", "full", "same"),
    ("ragjax full, nothing cached", "ragjax", "full", "same"),
    ("ragjax naive, cached passages\nin any order", "ragjax", "naive", "shuffled"),
    ("ragjax prefix, cached passages\nin the same order", "ragjax", "prefix", "same"),
)
"""Label, and the row of `ttft`: system, strategy, order. A system that no report has is left out."""

STRATEGIES = ("full", "naive", "blend", "craft", "fusion", "anchor")


def newest(results: Path, benchmark: str) -> list[Row]:
    """Rows of the newest report of a benchmark; names of reports begin with the day."""
    file = sorted(results.glob(f"*-cpu-{benchmark}.json"))[-1]
    rows: list[Row] = json.loads(file.read_text())["rows"]
    return rows


def first_tokens(results: Path) -> dict[str, float]:
    """Milliseconds to the first token of the long prompt, by label."""
    rows = newest(results, "ttft")
    longest = max(r["context_tokens"] for r in rows)
    found = {}
    for label, system, strategy, order in BARS:
        state = "cold" if strategy == "full" else "warm"
        for r in rows:
            same = (r["strategy"], r["order"], r["state"], r["context_tokens"]) == (strategy, order, state, longest)
            if same and r["system"].startswith(system):
                found[label] = float(r["ttft_ms"])
    return found


def divergences(results: Path) -> dict[str, float]:
    """KL from full attention by strategy: the mean over sets, each set's from its newest report."""
    by_set: dict[str, dict[str, float]] = {}
    for file in sorted(results.glob("*-cpu-quality-*.json")):
        for r in json.loads(file.read_text())["rows"]:
            if r["model"] == MODEL and r["part"] == "main" and r["set"] != "pooled":
                by_set.setdefault(r["set"], {})[r["strategy"]] = r["kl"]
    return {
        s: float(np.mean([of[s] for of in by_set.values()])) for s in STRATEGIES if all(s in x for x in by_set.values())
    }


def bars(axes: Any, found: dict[str, float]) -> None:
    labels = list(found)[::-1]
    colours = [OURS if label.startswith("ragjax") else OTHERS for label in labels]
    drawn = axes.barh(range(len(labels)), [found[label] for label in labels], color=colours, height=0.62)
    axes.bar_label(drawn, [f"{found[label]:,.0f} ms" for label in labels], padding=4, color=INK, fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlim(0, 1.2 * max(found.values()))
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("Time to first token, 2K tokens", loc="left", color=INK, fontsize=11)


def scatter(axes: Any, kl: dict[str, float], faster: dict[str, float]) -> None:
    for name in (s for s in STRATEGIES if s in kl and s in faster):
        axes.plot(faster[name], kl[name], "o", color=OURS if name == "anchor" else OTHERS, markersize=7)
        axes.annotate(name, (faster[name], kl[name]), (7, 4), textcoords="offset points", color=INK, fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(0.85, 1.9 * max(faster.values()))
    ticks = [1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [f"{x} x" for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=-0.02)
    axes.set_xlabel("first token, times faster than full", color=INK)
    axes.set_ylabel("KL from full attention, nats a token", color=INK)
    axes.set_title("15% of the cached passages' tokens recomputed", loc="left", color=INK, fontsize=11)


def svg(results: Path = RESULTS) -> str:
    faster = {r["strategy"]: float(r["faster_than_full"]) for r in newest(results, "repair")}
    settings: Any = {"svg.hashsalt": "ragjax", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(settings):
        picture = Figure(figsize=(10, 3.6), layout="tight")
        picture.patch.set_alpha(0)
        left, right = picture.subplots(1, 2, width_ratios=(1.15, 1))
        bars(left, first_tokens(results))
        scatter(right, divergences(results), faster)
        for axes in (left, right):
            axes.patch.set_alpha(0)
            axes.tick_params(colors=INK)
            for side, spine in axes.spines.items():
                spine.set_color(INK)
                spine.set_visible(spine.get_visible() and side in ("left", "bottom"))
        out = io.StringIO()
        picture.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    at = text.index(">", text.index("<svg")) + 1
    return "\n".join(line.rstrip() for line in (text[:at] + "\n " + DARK + text[at:]).splitlines()) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    argparse.ArgumentParser(prog="python -m benchmarks.plot_readme", description=about).parse_args(arguments)
    FILE.write_text(svg())
    print(f"wrote {FILE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
