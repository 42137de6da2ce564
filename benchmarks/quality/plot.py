"""Figures of `quality`'s rows that mirror those of FusionRAG and Cache-Craft; a figure without rows is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.common.plot import Figures, Panel, Panels, bars, label, lines
from benchmarks.common.report import Row

SELECTIONS = ("blend", "fusion+blend", "craft", "fusion+craft", "fusion", "anchor")  # FusionRAG, Figure 16
LADDER = ("unmoved", "craft-unmoved", "naive", "craft", "blend", "fusion", "anchor", "full")
"""Neither place nor causality fixed; place alone; some causality too; all (Cache-Craft, Table 3)."""


def _of(rows: Sequence[Row], part: str, name: str | None = None) -> list[Row]:
    return [r for r in rows if r["part"] == part and (name is None or r["set"] == name)]


def _sets(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(r["set"] for r in rows))


def _lines(rows: Sequence[Row], title: str, x: str, y: str, by: str = "strategy") -> Panel | None:
    """Curves of two points at least; full attention's value dashed, full reuse's dotted."""
    curves = lines(rows, title, x, y, by, least=2)
    if curves is None:
        return None

    def panel(axes: Any) -> None:
        for r in rows:
            if r["strategy"] in ("full", "naive") and r.get(y) is not None:
                style = "--" if r["strategy"] == "full" else ":"
                axes.axhline(r[y], color="k", linestyle=style, linewidth=0.7, label=r["strategy"])
        curves(axes)

    return panel


def _profile(rows: Sequence[Row], title: str, key: str, x: str) -> Panel | None:
    kept = [r for r in rows if r.get(key) and r["strategy"] != "full"]
    if not kept:
        return None

    def panel(axes: Any) -> None:
        for r in kept:
            name = r["strategy"] if r["ratio"] is None else f"{r['strategy']} {r['ratio']:g}"
            axes.plot(range(len(r[key])), r[key], linewidth=1, label=name)
        label(axes, title, x, key)

    return panel


def _each(make: Callable[[str], Sequence[Panel | None]], rows: Sequence[Row]) -> Iterator[Panel]:
    for name in _sets(rows):
        yield from filter(None, make(name))


def _deviation(rows: Sequence[Row]) -> Iterator[Panel]:
    main = _of(rows, "main")
    return _each(
        lambda s: [_profile(_of(main, "main", s), s, key, "layer") for key in ("deviation_k", "deviation_v")], main
    )


def _places(rows: Sequence[Row]) -> Iterator[Panel]:
    main = [r for r in _of(rows, "main") if r["ratio"] is not None]
    keys = {"place_in_chunk": "tenth of the chunk", "place_of_chunk": "tenth of the chunks"}
    return _each(lambda s: [_profile(_of(main, "main", s), s, key, x) for key, x in keys.items()], main)


def by_ratio(*values: str) -> Panels:
    def panels(rows: Sequence[Row]) -> Iterator[Panel]:
        sweep = _of(rows, "sweep")
        return _each(lambda s: [_lines(_of(sweep, "sweep", s), s, "ratio", y) for y in values], sweep)

    return panels


def selections(*values: str) -> Panels:
    """A bar for each selection, without and with preprocessing."""

    def panels(rows: Sequence[Row]) -> Iterator[Panel]:
        main = _of(rows, "main")

        def of_set(name: str) -> list[Panel | None]:
            found = {r["strategy"]: r for r in main if r["set"] == name}
            chosen = [found[s] for s in SELECTIONS if s in found]
            return [bars(chosen, name, y) if "fusion" in found else None for y in values]

        return _each(of_set, main)

    return panels


def by_neighbours(*values: str) -> Panels:
    def panels(rows: Sequence[Row]) -> Iterator[Panel]:
        chosen = [r for r in _of(rows, "neighbours") if r["neighbours"] is not None]
        return _each(
            lambda s: [_lines(_of(chosen, "neighbours", s), s, "neighbours", y, "ratio") for y in values], chosen
        )

    return panels


def _components(rows: Sequence[Row]) -> Iterator[Panel]:
    """Full reuse; with preprocessing; with selection; with both (those measured on the sweep's questions)."""

    def panels(name: str) -> list[Panel | None]:
        here = _of(rows, "neighbours", name)
        reuse = [r for r in here if r["strategy"] == "naive"]
        fusion = [r for r in here if r["strategy"] == "fusion"]
        whole = next((r for r in fusion if r["neighbours"] and r["ratio"]), None)
        if not reuse or whole is None:
            return []
        steps = [(reuse[0], "full reuse")]
        steps += [(r, "preprocessing") for r in fusion if r["neighbours"] == whole["neighbours"] and r["ratio"] == 0]
        steps += [(r, "selection") for r in fusion if r["neighbours"] == 0 and r["ratio"] == whole["ratio"]]
        steps += [(whole, "both")]
        kept, labels = [r for r, _ in steps], [label for _, label in steps]
        return [bars(kept, name, y, labels) for y in ("kl", "f1", "ttft_ms")] if len(steps) > 2 else []

    return _each(panels, _of(rows, "neighbours"))


def against_cost(*values: str) -> Panels:
    """Scores by the share that was recomputed in truth."""

    def panels(rows: Sequence[Row]) -> Iterator[Panel]:
        chosen = _of(rows, "sweep") or _of(rows, "main")
        return _each(
            lambda s: [
                lines([r for r in chosen if r["set"] == s], s, "recomputed_share", y, "strategy") for y in values
            ],
            chosen,
        )

    return panels


def _ladder(rows: Sequence[Row]) -> Iterator[Panel]:
    main = _of(rows, "main")

    def panels(name: str) -> list[Panel | None]:
        found = {r["strategy"]: r for r in main if r["set"] == name}
        chosen = [found[s] for s in LADDER if s in found]
        return [bars(chosen, name, "rougeL_vs_full")] if "unmoved" in found else []

    return _each(panels, main)


FIGURES: Figures = {
    "fusionrag_3": ("KV deviation from full attention by layer", _deviation),
    "fusionrag_8": ("Where recomputed tokens lie", _places),
    "fusionrag_13": ("Normalised F1 and EM by recomputed share", by_ratio("normalised_f1", "em")),
    "fusionrag_16": ("Selections without and with preprocessing", selections("kl", "f1")),
    "fusionrag_17": ("fusion by number of neighbours; a line for each ratio", by_neighbours("kl", "f1")),
    "fusionrag_18": ("What preprocessing and selection each bring", _components),
    "cachecraft_15": ("Divergence from full attention by recomputed share", by_ratio("kl")),
    "cachecraft_20": ("ROUGE-L against full attention's answers by recomputed share", by_ratio("rougeL_vs_full")),
    "cachecraft_26": (
        "ROUGE-L against full attention's answers by tokens recomputed in truth",
        against_cost("rougeL_vs_full"),
    ),
    "cachecraft_table_3": ("Position and causality: ROUGE-L against full attention's answers", _ladder),
}
