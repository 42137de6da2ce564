"""Cache-Craft, Figure 8: how many past requests a request's chunks come from, and what reusing them from several costs.

8a: of requests all of whose five chunks were retrieved before, the least number of past requests that hold them all
together. The paper: three for most requests of Sys-X and 2WikiMQA, one for about 10% and 8%. Here a set's questions
are asked once each, in the file's order, and retrieve five documents by BM25; the past is every earlier question.

8b: ROUGE-L against full attention's answer when the five chunks are reused, unrepaired and at new positions, from s
past requests (`craft` at ratio 0). For one source, the past request had the same five in the same order; for s, they
are dealt into s runs, and each past request has one run at a random place among other passages. The paper: half of
the F1 is lost with five sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.figures.observe import PAST_QUESTION, Observer
from benchmarks.policies.source import Corpus, bm25
from benchmarks.quality.dataset import Question
from benchmarks.quality.score import rouge_l
from ragjax.core import Answer, Chunk, ConfigError
from ragjax.quality.report import divergence

SETS = ("2wikimultihopqa", "squad_xquad_en", "nq_open")
REUSED = "2wikimultihopqa"
"""The set of 8b."""
TOGETHER = 5
SCORED, ANSWER = 12, 24
"""Tokens of the reference answer over which distributions are compared, and tokens that are generated."""


# ----------------------------------------------------------------------------------------- 8a


def fewest(request: frozenset[str], past: Sequence[frozenset[str]]) -> int | None:
    """The least number of past requests that hold all of a request's chunks together; None if none do."""
    masks = {request & each for each in past} - {frozenset()}
    reached, held = 0, {frozenset[str]()}
    while request not in held:
        larger = {one | other for one in held for other in masks}
        if larger <= held:
            return None
        held, reached = held | larger, reached + 1
    return reached


def sources(requests: Sequence[Sequence[str]]) -> list[int | None]:
    """Of each request, in order: the fewest earlier ones that hold its chunks."""
    sets = [frozenset(request) for request in requests]
    return [fewest(own, sets[:i]) for i, own in enumerate(sets)]


def sources_rows(name: str, found: Sequence[int | None]) -> list[Row]:
    """The share of each number of sources, of the requests that have all chunks."""
    known = [s for s in found if s is not None]
    head = {"set": name, "part": "sources", "requests": len(found), "n": len(known)}
    return [head | {"sources": s, "share": known.count(s) / max(1, len(known))} for s in range(1, TOGETHER + 1)]


# ----------------------------------------------------------------------------------------- 8b


def runs(chunks: Sequence[Chunk], count: int) -> list[list[Chunk]]:
    """The chunks dealt into runs of neighbours, as equal as can be."""
    return [[chunks[i] for i in part] for part in np.array_split(np.arange(len(chunks)), count)]


def past_requests(
    chunks: Sequence[Chunk], foreign: Iterator[Chunk], count: int, random: np.random.Generator
) -> Iterator[list[Chunk]]:
    """Requests that hold one run of the chunks each, at a random place among foreign ones; one run stands alone."""
    for run in runs(chunks, count):
        others = [next(foreign) for _ in range(len(chunks) - len(run))]
        place = int(random.integers(1, len(others) + 1)) if others else 0
        yield [*others[:place], *run, *others[place:]]


def reuse(look: Observer, question: Question, foreign: Iterator[Chunk], seed: int) -> list[dict[str, float]]:
    """Of one question, a sample for each number of sources, 1 to 5."""
    engine, random = look.engine, np.random.default_rng(seed)
    chunks = [look.chunk(passage) for passage in question.passages[:TOGETHER]]
    prompt = look.prompt(question.text, chunks)
    continuation = engine.tokenizer.encode(question.answers[0], special=False, continued=True)[:SCORED]

    def ask(strategy: str, tenant: str, ratio: float | None = None) -> Answer:
        return engine.answer_prompt(
            prompt, strategy=strategy, recompute_ratio=ratio, tenant=tenant, continuation=continuation,
            max_tokens=ANSWER,
        )  # fmt: skip

    full, made = ask("full", ""), []
    for count in range(1, TOGETHER + 1):
        tenant = f"{question.id}/{count}"
        for past in past_requests(chunks, foreign, count, random):
            engine.answer_prompt(look.prompt(PAST_QUESTION, past), strategy="craft", tenant=tenant, max_tokens=1)
        answer = ask("craft", tenant, 0.0)
        reused = [r for r in answer.segments if r.score is not None]
        assert full.scores is not None and answer.scores is not None
        made.append({
            "kl": divergence(full.scores, answer.scores).kl,
            "rougeL_vs_full": rouge_l(answer.text, [full.text]),
            "recomputed_share": sum(r.recomputed for r in reused) / sum(r.tokens for r in reused),
        })  # fmt: skip
        engine.clear_cache()  # the next samples have variants of their own
    return made


def reuse_rows(name: str, samples: Sequence[Sequence[dict[str, float]]]) -> list[Row]:
    """A row for each number of sources. samples: of each question, one for each."""
    rows: list[Row] = []
    for count, each in enumerate(zip(*samples, strict=True), 1):
        made: dict[str, Any] = {"set": name, "part": "reuse", "sources": count, "n": len(each)}
        for key in ("kl", "rougeL_vs_full", "recomputed_share"):
            made |= mean([s[key] for s in each], key)
        rows.append(made)
    return rows


def measure(setup: Setup) -> list[Row]:
    """Rows of both parts."""
    rows: list[Row] = []
    for name in SETS:
        corpus = Corpus.read(setup.folder / "text" / name, setup.limit if setup.quick else None)
        rows += sources_rows(name, sources(bm25(corpus, TOGETHER)))
    questions = setup.questions(REUSED).questions
    asked = [q for q in questions if len(q.passages) >= TOGETHER][: setup.limit]
    others = [p for q in questions if q not in asked for p in q.passages]
    if not others:
        raise ConfigError(f"past requests need passages of {REUSED}'s other questions: lower --limit")
    with setup.engine() as engine:
        look = Observer(engine)
        foreign = (look.chunk(passage) for passage in cycle(others))
        order = setup.each([q.id for q in asked], "question")
        samples = [reuse(look, asked[i], foreign, i) for i, _ in enumerate(order)]
    return rows + reuse_rows(REUSED, samples)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Sources; then answers and divergence by sources."""

    def shares(axes: Any) -> None:
        names = list(dict.fromkeys(r["set"] for r in rows if r["part"] == "sources"))
        for i, name in enumerate(names):
            mine = [r for r in rows if r["set"] == name and r["part"] == "sources"]
            x = [r["sources"] + (i - (len(names) - 1) / 2) * 0.25 for r in mine]
            axes.bar(x, [r["share"] for r in mine], width=0.25, label=f"{name} ({mine[0]['n']} requests)")
        label(axes, "8a: past requests that hold all five chunks", "past requests", "share of requests")

    def curve(y: str, title: str) -> Panel:
        def panel(axes: Any) -> None:
            mine = [r for r in rows if r["part"] == "reuse"]
            gaps = [[r[y] - r[f"{y}_lo"] for r in mine], [r[f"{y}_hi"] - r[y] for r in mine]]
            x = [r["sources"] for r in mine]
            axes.errorbar(x, [r[y] for r in mine], yerr=gaps, marker="o", capsize=3, label=mine[0]["set"])
            axes.set_ylim(bottom=0)
            label(axes, title, "past requests that the chunks come from", y)

        return panel

    return [shares, curve("rougeL_vs_full", "8b: answers, nothing repaired"), curve("kl", "8b: divergence")]


FIGURE = Figure(
    paper="Cache-Craft, Figure 8",
    shows="past requests that chunks come from, and answers over chunks from several of them",
    differs="questions asked once, BM25; ROUGE-L and KL against full attention instead of F1; 2wikimultihopqa for 8b",
    measure=measure,
    panels=panels,
    columns=("set", "part", "sources", "requests", "n", "share", "rougeL_vs_full", "rougeL_vs_full_lo",
             "rougeL_vs_full_hi", "kl", "kl_lo", "kl_hi", "recomputed_share"),
    limit=12,
    quick=2,
)  # fmt: skip
