"""Cache-Craft, Figure 25: how many variants each chunk has in the cache at the end of a stream of requests.

The paper: at the end of Sys-X's trace there are 186 chunk-caches, one to eleven for a chunk, because N x M instances
are kept in total and not M for each chunk (section 3.3). Here the questions of a set come in the file's order, each
over the five documents that BM25 finds; `craft` keeps at most N x M = 100 variants and takes a new one where mending
the best one would take more than half of the chunk (tau = 0.5; the paper adds a variant for every new prefix, and
does not say when one is reused instead). Rows are chunks by their number of variants; the first one also has the
totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup
from benchmarks.figures.observe import Observer
from benchmarks.policies.source import Corpus, bm25
from ragjax.core import Chunk
from ragjax.reuse.craft import Craft
from ragjax.reuse.ranking import VARIANT

SET = "squad_xquad_en"
TOGETHER = 5
LIMIT = 100
"""N x M."""
TAU = 0.5


def stream(setup: Setup, look: Observer) -> Iterator[tuple[str, list[Chunk]]]:
    """Questions and the first chunks of their documents."""
    corpus = Corpus.read(setup.folder / "text" / SET, setup.limit)
    questions = setup.questions(SET)
    for text, ids in zip(corpus.questions, bm25(corpus, TOGETHER), strict=True):
        yield text, [look.chunk(questions.corpus[key]) for key in ids]


def rows_of(variants: Sequence[int], uses: Sequence[int], totals: dict[str, Any]) -> list[Row]:
    """variants, uses: of each chunk that was retrieved, how many are kept, and the requests that had it."""
    ranked = sorted(zip(variants, uses, strict=True), reverse=True)
    kept = [(v, u) for v, u in ranked if v]
    rows: list[dict[str, Any]] = [
        {"set": SET, "rank": rank, "variants": count, "requests": used} for rank, (count, used) in enumerate(kept, 1)
    ]
    if rows:
        rows[0] |= totals | {"kept": sum(v for v, _ in kept), "chunks": len(kept), "retrieved": len(ranked)}
    return list(rows)


def measure(setup: Setup) -> list[Row]:
    """Answer the stream, then count."""
    craft = Craft("craft", tau=TAU)
    uses: Counter[str] = Counter()
    chunks: dict[str, Chunk] = {}
    whole = reused = 0
    with setup.engine({"craft": craft}, variants=LIMIT) as engine:
        look = Observer(engine)
        requests = list(stream(setup, look))
        for i in map(int, setup.each([str(i) for i in range(len(requests))], "request")):
            text, found = requests[i]
            answer = engine.answer_prompt(look.prompt(text, found), strategy=craft, max_tokens=1)
            for chunk in found:
                chunks[chunk.id] = chunk
                uses[chunk.id] += 1
            passages = [r for r in answer.segments if r.score is not None]
            whole += sum(r.tokens for r in passages)
            reused += sum(r.reused for r in passages)
        cache = engine._cache  # nothing runs any more
        variants = [len(cache.variants(chunk.tokens, VARIANT, cold=False)) for chunk in chunks.values()]
    totals = {"n": len(requests), "reused_share": reused / max(1, whole), "limit": LIMIT}
    return rows_of(variants, [uses[key] for key in chunks], totals)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Variants and requests of each chunk."""

    def panel(axes: Any) -> None:
        axes.bar([r["rank"] for r in rows], [r["variants"] for r in rows], width=1.0, label="variants kept")
        axes.plot([r["rank"] for r in rows], [r["requests"] for r in rows], "k.", markersize=3, label="requests")
        label(axes, f"{rows[0]['kept']} variants of {rows[0]['chunks']} chunks", "chunk, by variants", "count")

    return [panel]


FIGURE = Figure(
    paper="Cache-Craft, Figure 25",
    shows="variants of each chunk at the end of a stream",
    differs="questions of squad_xquad_en with BM25 instead of Sys-X's trace; at most 100 variants; tau 0.5",
    measure=measure,
    panels=panels,
    columns=("set", "rank", "variants", "requests", "n", "kept", "chunks", "retrieved", "reused_share"),
    limit=150,
    quick=12,
)
