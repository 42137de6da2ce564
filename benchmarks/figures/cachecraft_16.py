"""Cache-Craft, Figures 16 and 17: after how many layers the chunks that a question looks at are known.

Figure 17: the attention that a question's tokens give to each chunk, summed up to each layer (eq. 15), of one
question. Figure 16: the share of questions for which Algorithm 1 has found the chunks in focus up to each layer (the
paper: about 80% of them between layers 10 and 15 of LLaMA-3-8B's 32), and how many chunks are in focus. The attention
is that of full attention; `craft-focus` sees that over mended chunks. `spared`: share of the chunks' tokens times
layers that would not be recomputed if everything was recomputed up to that layer and then only what is in focus.
`settled`: share of questions whose set in focus is the one that all layers give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.figures.observe import Observer, Seen
from ragjax.reuse.focus import WINDOW, find_focus

SETS = ("hotpotqa", "nq_open")


def sample(inter_LZ: NDArray[np.float64], lengths: Sequence[int]) -> dict[str, float]:
    """Of one question. lengths: tokens of the chunks. Where the focus is never found, all chunks stay in it."""
    depth, chunks = inter_LZ.shape
    focus = find_focus(inter_LZ)
    layer = depth if focus is None else focus.layer
    kept = range(chunks) if focus is None else sorted(focus.chunks)
    final = find_focus(np.repeat(inter_LZ.sum(0, keepdims=True), WINDOW, axis=0))  # by the sums over all layers
    out = 1 - sum(lengths[i] for i in kept) / sum(lengths)
    return {
        "layer": layer,
        "found": float(focus is not None),
        "in_focus": len(kept),
        "spared": out * (1 - layer / depth),
        "settled": float(final is not None and set(final.chunks) == set(kept)),
    }


def rows_of(name: str, samples: Sequence[dict[str, float]], example_LZ: NDArray[np.float64]) -> list[Row]:
    """A row of the set, a row a layer, and a row for each chunk of the example."""
    depth = len(example_LZ)
    summary: dict[str, Any] = {"set": name, "part": "set", "n": len(samples), "layers": depth}
    for key in ("layer", "found", "in_focus", "spared", "settled"):
        summary |= mean([s[key] for s in samples], key)
    rows: list[Row] = [summary]
    for layer in range(1, depth + 1):
        known = float(np.mean([s["found"] > 0 and s["layer"] <= layer for s in samples]))
        rows.append({"set": name, "part": "layer", "layer": layer, "n": len(samples), "known": known})
    shares_LZ = np.cumsum(example_LZ, axis=0)
    shares_LZ /= shares_LZ.sum(1, keepdims=True)
    focus = find_focus(example_LZ)
    for chunk, share_L in enumerate(shares_LZ.T):
        focused = focus is not None and chunk in focus.chunks
        rows.append({"set": name, "part": "chunk", "chunk": chunk, "focused": focused, "by_layer": share_L.tolist()})
    return rows


def measure(setup: Setup) -> list[Row]:
    """Rows of both figures."""
    rows: list[Row] = []
    with setup.engine() as engine:
        look = Observer(engine)
        for name in setup.each(SETS[:1] if setup.quick else SETS, "set"):
            seen: list[Seen] = []
            for question in setup.questions(name).questions[: setup.limit]:
                seen.append(
                    look.see(look.prompt(question.text, [look.chunk(p) for p in question.passages]), values=False)
                )
            lengths = [[len(s.prompt.segments[i]) for i in s.chunks] for s in seen]
            samples = [sample(s.asked(), length) for s, length in zip(seen, lengths, strict=True)]
            rows += rows_of(name, samples, seen[0].asked())
    return rows


def panels_16(rows: Sequence[Row]) -> list[Panel]:
    """How many questions' focus is known by layer."""

    def panel(axes: Any) -> None:
        for name in dict.fromkeys(r["set"] for r in rows):
            mine = [r for r in rows if r["set"] == name and r["part"] == "layer"]
            axes.step([r["layer"] for r in mine], [r["known"] for r in mine], where="post", label=name)
        axes.set_ylim(0, 1.02)
        label(axes, "chunks in focus are known", "after layer", "share of questions")

    return [panel]


def panels_17(rows: Sequence[Row]) -> list[Panel]:
    """A question of each set: its chunks' shares of the attention; chunks in focus are drawn thick."""

    def of(name: str) -> Panel:
        def panel(axes: Any) -> None:
            for r in rows:
                if r["set"] == name and r["part"] == "chunk":
                    width = 2.0 if r["focused"] else 0.7
                    text = f"chunk {r['chunk'] + 1}" + (" (in focus)" if r["focused"] else "")
                    axes.plot(range(1, len(r["by_layer"]) + 1), r["by_layer"], linewidth=width, label=text)
            label(axes, f"{name}: one question", "layers summed up to", "share of the question's attention")

        return panel

    return [of(name) for name in dict.fromkeys(r["set"] for r in rows if r["part"] == "chunk")]


def _figure(number: int, shows: str, panels: Any) -> Figure:
    return Figure(
        paper=f"Cache-Craft, Figure {number}",
        shows=shows,
        differs="30 layers of SmolLM2-135M instead of 32 of LLaMA-3-8B; attention of full attention; ten passages",
        measure=measure,
        panels=panels,
        columns=("set", "part", "n", "layer", "found", "in_focus", "spared", "settled", "known"),
        limit=40,
    )


FIGURE_16 = _figure(16, "questions whose chunks in focus are known, by layer", panels_16)
FIGURE_17 = _figure(17, "a question's attention to its chunks, summed over layers", panels_17)
