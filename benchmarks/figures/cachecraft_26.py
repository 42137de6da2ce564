"""Cache-Craft, Figure 26: what each part of the design is worth: answers by tokens that were recomputed.

The paper, on 2WikiMQA: full reuse with positions put right has ROUGE 0.665; without beta 54% is recomputed and
without focus 70%, for no more quality; random tokens at 30% give 0.73; alpha = 0.5, 1, 2 and 3 give 0.825, 0.896,
0.94 and 0.953. Here `design` is Cache-Craft with CCI, beta and focus at these alphas, `no beta`, `no focus` and `no
CCI` leave one out at alpha = 1, `random` recomputes as many random tokens as `design` at alpha = 1 did on the same
question, and `full reuse` takes the same variants unrepaired (`craft` at ratio 0; `naive`, whose chunks stand alone,
beside it).

With focus a token may be recomputed in some layers only: `recomputed_share` counts tokens times layers. Two columns
say what counting tokens gives, and what focus would give if it ended within a stage (`ideal_share`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.quality.dataset import Question
from benchmarks.quality.evaluation import FULL, Evaluation, Setting, recomputed_share
from benchmarks.quality.score import rouge_l
from ragjax.core import Answer
from ragjax.quality.report import divergence
from ragjax.reuse.base import Strategy
from ragjax.reuse.craft import Craft
from ragjax.reuse.ranking import without_beta, without_cci

SET = "2wikimultihopqa"
ALPHAS = (0.5, 1.0, 2.0, 3.0)
KEYS = ("rougeL_vs_full", "kl", "recomputed_share", "token_share", "ideal_share")
DESIGN = "design"


@dataclass(frozen=True)
class Variant:
    """One point of the figure. strategy: None for a registered one, by the setting's name."""

    name: str
    alpha: float | None
    setting: Setting
    strategy: Strategy | None = None


def variants() -> list[Variant]:
    """All points but the random one, whose share follows from the design's."""

    def craft(name: str, alpha: float, **parts: Any) -> Variant:
        own = f"craft {name} {alpha:g}"
        return Variant(name, alpha, Setting(own), Craft(own, alpha=alpha, **parts))

    return [
        Variant("full reuse", None, Setting("craft", 0.0)),
        Variant("naive", None, Setting("naive")),
        *(craft(DESIGN, alpha, focus=True) for alpha in ALPHAS),
        craft("no beta", 1.0, focus=True, overhead=without_beta),
        craft("no CCI", 1.0, focus=True, overhead=without_cci),
        craft("no focus", 1.0),
    ]


def sample(answer: Answer, full: Answer) -> dict[str, float]:
    """What is measured on one answer."""
    assert answer.scores is not None and full.scores is not None
    share, saved = recomputed_share(answer), answer.figures
    return {
        "rougeL_vs_full": rouge_l(answer.text, [full.text]),
        "kl": divergence(full.scores, answer.scores).kl,
        "recomputed_share": share * (1 - saved.get("focus_realised", 0.0)),
        "token_share": share,
        "ideal_share": share * (1 - saved.get("focus_ideal", 0.0)),
    }


def one(work: Evaluation, question: Question, points: Sequence[Variant]) -> dict[tuple[str, float | None], Any]:
    """Every point's sample on a question."""
    work.prepare(question, [point.setting for point in points])
    full = work.ask(question, FULL)
    found = {(p.name, p.alpha): sample(work.ask(question, p.setting, p.strategy), full) for p in points}
    share = found[DESIGN, 1.0]["recomputed_share"]
    found["random", None] = sample(work.ask(question, Setting("random", min(1.0, share))), full)
    return found


def rows_of(name: str, samples: Sequence[Mapping[tuple[str, float | None], Mapping[str, float]]]) -> list[Row]:
    """A row for each point."""
    rows: list[Row] = []
    for design, alpha in samples[0]:
        row: dict[str, Any] = {"set": name, "design": design, "alpha": alpha, "n": len(samples)}
        for key in KEYS:
            row |= mean([s[design, alpha][key] for s in samples], key)
        rows.append(row)
    return rows


def measure(setup: Setup) -> list[Row]:
    """A row for each point."""
    points = variants()
    with setup.engine() as engine:
        work = setup.evaluation(engine, setup.questions(SET), whole_corpus=False)
        for _ in work.teach(["craft"]):
            pass
        numbers = setup.each([str(i) for i in range(len(work.questions))], "question")
        return rows_of(SET, [one(work, work.questions[int(i)], points) for i in numbers])


def panels(rows: Sequence[Row]) -> list[Panel]:
    """ROUGE-L, and divergence, by what was recomputed."""

    def of(y: str) -> Panel:
        def panel(axes: Any) -> None:
            mine = [r for r in rows if r["design"] == DESIGN]
            axes.plot([r["recomputed_share"] for r in mine], [r[y] for r in mine], "o:", markersize=4, label="design")
            for r in mine:
                axes.annotate(f"  alpha {r['alpha']:g}", (r["recomputed_share"], r[y]), fontsize=7)
            for r in rows:
                if r["design"] != DESIGN:
                    axes.plot(r["recomputed_share"], r[y], "s", markersize=5, label=r["design"])
            label(axes, rows[0]["set"], "share recomputed, tokens times layers", y)

        return panel

    return [of("rougeL_vs_full"), of("kl")]


FIGURE = Figure(
    paper="Cache-Craft, Figure 26",
    shows="what CCI, beta, focus and alpha are worth",
    differs="SmolLM2-135M; past requests are generated; `no CCI` keeps beta, and random tokens stand apart",
    measure=measure,
    panels=panels,
    columns=("set", "design", "alpha", "n", "recomputed_share", "token_share", "ideal_share", "rougeL_vs_full",
             "rougeL_vs_full_lo", "rougeL_vs_full_hi", "kl", "kl_lo", "kl_hi"),
    limit=25,
)  # fmt: skip
