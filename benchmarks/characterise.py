"""How skewed retrieval is, and how often chunks come back: alone, and behind the same chunks.

Access curves, the share of all accesses that the most accessed items take: documents by question set and way of
retrieval (RAGCache, Figures 5 and 6: BM25, the supporting passages, and with --encoder the packaged encoder behind
exact, inverted-list and graph indexes), chunks and ordered 5-tuples of chunks (Cache-Craft, Figure 6), entities of
graph questions (DepCache, Figure 4). Reuse density: how many of the up to 1,000 requests before one began with the same
k chunks (Cache-Craft, Figure 6b). Nobody's log of requests is here: every question is asked once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import plot, report
from benchmarks.common.questions import read_lines
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.policies.source import Corpus, bm25, corpora
from ragjax.commands.flags import integer
from ragjax.core import ConfigError

TUPLE = 5  # chunks that a request retrieves
RECENT = 1000  # requests back that density looks (Cache-Craft, section 2.4)
INDEXES = ("flat", "ivf", "hnsw")
QUICK_DOCUMENTS = 200  # of the encoder, which takes the time

TOPS = (0.03, 0.05, 0.2)
"""Shares of the items whose accesses the papers quote: 3% (RAGCache), 5% (Cache-Craft) and 20% (DepCache)."""

COLUMNS = (
    "figure", "set", "setting", "items", "requests", "accessed", "top_3", "top_5", "top_20", "uniform",
    "density_1", "density_2", "density_3", "density_4", "density_5",
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Accesses of items, most accessed first. items: how many there are, the never accessed ones included."""

    figure: str
    set: str
    setting: str
    counts: tuple[int, ...]
    items: int
    requests: int
    density: tuple[float, ...] = field(default=())

    @classmethod
    def of(
        cls, figure: str, name: str, setting: str, requests: Sequence[Iterable[Hashable]], items: int | None = None
    ) -> Curve:
        """From what each request accesses; an item counts once a request."""
        counts = Counter(item for request in requests for item in set(request))
        ordered = tuple(sorted(counts.values(), reverse=True))
        return cls(figure, name, setting, ordered, max(items or 0, len(ordered)), len(requests))

    def share(self, top: float) -> float:
        """Share of all accesses that the most accessed `top` of all items take; part of an item counts in part."""
        whole, part = divmod(top * self.items, 1)
        taken: float = sum(self.counts[: int(whole)])
        if int(whole) < len(self.counts):
            taken += part * self.counts[int(whole)]
        return taken / max(sum(self.counts), 1)

    def points(self) -> tuple[list[float], list[float]]:
        """The curve: shares of the items, and of the accesses."""
        total = np.concatenate([[0], np.cumsum(self.counts)]) / max(sum(self.counts), 1)
        return [i / self.items for i in range(len(total))], [float(y) for y in total]

    def row(self) -> dict[str, Any]:
        """As the report has it; uniform: the share that 20% of the items would have if those accessed were alike."""
        tops = {f"top_{round(100 * top)}": self.share(top) for top in TOPS}
        density = {f"density_{k}": value for k, value in enumerate(self.density, 1)}
        return {
            "figure": self.figure, "set": self.set, "setting": self.setting, "items": self.items,
            "requests": self.requests, "accessed": len(self.counts), **tops,
            "uniform": min(1.0, 0.2 * self.items / max(len(self.counts), 1)), **density,
        }  # fmt: skip


def density(requests: Sequence[Sequence[Hashable]], longest: int = TUPLE, recent: int = RECENT) -> tuple[float, ...]:
    """For k = 1 … longest: of the `recent` requests before one, how many began with the same k items; mean over all."""
    found = [0] * longest
    seen: Counter[tuple[Hashable, ...]] = Counter()
    for at, request in enumerate(requests):
        for k in range(1, min(longest, len(request)) + 1):
            found[k - 1] += seen[tuple(request[:k])]
            seen[tuple(request[:k])] += 1
        if at >= recent:
            old = requests[at - recent]
            for k in range(1, min(longest, len(old)) + 1):
                seen[tuple(old[:k])] -= 1
    return tuple(count / max(len(requests), 1) for count in found)


def documents(corpus: Corpus, retrieved: Sequence[Sequence[str]], setting: str) -> Iterator[Curve]:
    """RAGCache's curve of the best document, and Cache-Craft's of chunks and 5-tuples."""
    asked = [ids for ids in retrieved if ids]
    if not asked:
        return
    total = len(corpus.documents)
    yield Curve.of("RAGCache 5, 6", corpus.name, f"{setting}, top-1", [ids[:1] for ids in asked], total)
    chunks = Curve.of("Cache-Craft 6a", corpus.name, f"{setting}, top-{TUPLE}", asked, total)
    yield Curve(**{**vars(chunks), "figure": "Cache-Craft 6a, 6b", "density": density(asked)})
    whole = [[tuple(ids)] for ids in asked if len(ids) == TUPLE]
    if whole:
        yield Curve.of("Cache-Craft 6c", corpus.name, f"{setting}, {TUPLE}-tuples", whole)


def encoded(corpus: Corpus, most: int | None) -> Iterator[tuple[str, list[list[str]]]]:
    """Top-5 by the packaged encoder, for each kind of index; `most` bounds the documents, supporting ones first."""
    from ragjax.models.encoder import Encoder
    from ragjax.models.hub import resolve
    from ragjax.retrieval.index import NONE, VectorIndex

    encoder = Encoder.load(resolve("all-minilm-l6-v2").path)
    supporting = dict.fromkeys(key for ids in corpus.supporting for key in ids)
    keys = list({**supporting, **dict.fromkeys(corpus.documents)})[:most]
    vectors = encoder.encode([corpus.documents[key] for key in keys])
    asked = encoder.encode(corpus.questions)
    for kind in INDEXES:
        index = VectorIndex(kind, encoder.dim)
        index.add(np.arange(len(keys)), vectors)
        found, _ = index.search(asked, TUPLE)
        yield f"minilm {kind}", [[keys[i] for i in row if i != NONE] for row in found]


def entities(path: Path, limit: int | None) -> Curve:
    """DepCache's curve: the entities a question asks about and those on its paths."""
    asked = [
        {*question["topic_entities"], *(node for steps in question["paths"] for node in steps[::2])}
        for question in list(read_lines(path, "topic_entities", "paths"))[:limit]
    ]
    return Curve.of("DepCache 4", path.parent.name, "entities on paths", asked)


def curves(data: Path, limit: int | None, encoder: bool, most: int | None) -> Iterator[Curve]:
    for corpus in corpora(data, limit):
        print(corpus.name, file=sys.stderr)
        ways = [("bm25", bm25(corpus, TUPLE)), ("supporting", [list(ids) for ids in corpus.supporting])]
        if encoder:
            ways.extend(encoded(corpus, most))
        for setting, retrieved in ways:
            yield from documents(corpus, retrieved, setting)
    for path in sorted(data.glob("kg/*/questions.jsonl")):
        yield entities(path, limit)


def draw(found: Sequence[Curve], file: Path) -> None:
    """One picture for each figure of the papers, the diagonal dashed, and one of densities."""

    def accesses(name: str) -> plot.Panel:
        def panel(axes: Any) -> None:
            for curve in found:
                if curve.figure == name:
                    axes.plot(*curve.points(), linewidth=1, label=f"{curve.set}: {curve.setting}")
            axes.plot([0, 1], [0, 1], "k--", linewidth=0.5)
            plot.label(axes, name, "share of all items", "share of accesses")

        return panel

    def densities(axes: Any) -> None:
        for curve in found:
            if curve.density:
                axes.plot(range(1, len(curve.density) + 1), curve.density, marker="o", markersize=3, label=curve.set)
        plot.label(axes, "reuse density", "first k chunks", "earlier requests that began so")

    plot.save([*map(accesses, dict.fromkeys(curve.figure for curve in found)), densities], file)


def options(flags: Parser) -> None:
    flags.add("--data", type=report.existing_folder, metavar="DIR", required=True, help="a folder with text/ and kg/")
    flags.add("--encoder", action="store_true", help="also retrieve with the packaged encoder and faiss")
    flags.add("--limit", type=integer(1), default=10**9, quick=60, metavar="N", help="at most N questions a set")
    flags.add("--plot", type=report.writable, metavar="FILE.png", help="also draw the curves")


def measure(chosen: Namespace, _: Session) -> list[dict[str, Any]]:
    found = list(curves(chosen.data, chosen.limit, chosen.encoder, QUICK_DOCUMENTS if chosen.quick else None))
    if not found:
        raise ConfigError(f"{chosen.data} holds no text sets with a corpus and no graph questions")
    if chosen.plot is not None:
        draw(found, chosen.plot)
    return [curve.row() for curve in found]


main = Benchmark("characterise", __doc__, COLUMNS, measure, options).main

if __name__ == "__main__":
    sys.exit(main())
