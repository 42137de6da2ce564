"""What it is worth to begin answers before their search has ended (RAGCache, Figure 19 and Table 3).

Questions of DIR/text/SET are answered from one corpus, the passages of all sets in CORPORA together. The search sleeps
for `--stage-ms` before each stage: it stands for a large index that other processors search. Questions come one at a
time (the paper: 0.1 requests a second), each with and without speculation in turn, with no KV known beforehand.

`search_ms` is the whole search, `exposed_ms` its part before the begin of the generation with the final chunks; medians
over questions. `less` is the median exposed time without speculation over that with it, `faster` the same of the time
to first token. `early_N` is the share of all questions for which stage N already has the final chunks, in order.
"""

from __future__ import annotations

import argparse
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import plot, report
from benchmarks.common.machine import ROOT
from benchmarks.common.questions import read_lines
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress
from ragjax.commands.flags import integer
from ragjax.core import ConfigError, Document
from ragjax.engine import Engine
from ragjax.retrieval.chunk_store import open_index
from ragjax.retrieval.index import Ids, IndexKind, IndexStage, VectorIndex, Vectors
from ragjax.retrieval.knowledge import KnowledgeBase

CORPORA = ("nq_open", "hotpotqa")
STAGES = 4
STAGE_MS = (12.5, 112.5)  # with four stages a search takes 50 or 450 ms, about the shortest and the longest of Table 3
QUICK_DOCUMENTS = 300
PAUSE = 0.02  # seconds before each question, in which what the last one left behind comes to an end
COLUMNS = (
    "set", "index", "documents", "search_ms", "n", "prompt_tokens", "exposed_ms_off", "exposed_ms", "less",
    "ttft_ms_off", "ttft_ms", "faster", "early_1", "early_2", "early_3", "hit", "wrong", "wasted_tokens",
)  # fmt: skip


class Distant:
    """A vector index whose search takes `stages` times `pause` seconds longer, asleep; all else is the index's."""

    def __init__(self, index: VectorIndex, stages: int, pause: float):
        self._index, self._stages, self._pause = index, stages, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Vectors]:
        time.sleep(self._stages * self._pause)
        return self._index.search(queries, k)

    def stages(self, query: Vectors, k: int, n: int) -> Iterator[IndexStage]:
        found = self._index.stages(query, k, n)
        while True:
            time.sleep(self._pause)
            yield (stage := next(found))
            if stage.final:
                return


def questions(data: Path, name: str) -> list[str]:
    """The questions of a set, with their choices if they have any.

    Raises:
        ConfigError: if there is no such set.
    """
    path = data / "text" / name / "questions.jsonl"
    if not path.is_file():
        raise ConfigError(f"{data} has no set {name!r} (text/{name}/questions.jsonl)")
    return ["\n".join([entry["question"], *entry.get("choices", ())]).strip() for entry in read_lines(path, "question")]


def documents(data: Path, most: int | None) -> list[Document]:
    """The passages of all corpora, by id. most: of each."""
    found: dict[str, Document] = {}
    for name in CORPORA:
        path = data / "text" / name / "corpus.jsonl"
        if path.is_file():
            entries = list(read_lines(path, "id", "text"))[:most]
            found |= {entry["id"]: Document(entry["id"], entry["text"], entry.get("title", "")) for entry in entries}
    if not found:
        raise ConfigError(f"{data} has none of text/{{{','.join(CORPORA)}}}/corpus.jsonl")
    return list(found.values())


def early(base: KnowledgeBase, asked: Sequence[str], k: int, stages: int) -> dict[str, float]:
    """For each stage but the last, the share of questions for which it has the chunks of the last one, in order."""
    same = [0] * (stages - 1)
    for question in asked:
        found = [[hit.chunk.id for hit in stage.hits] for stage in base.stages(question, k, stages)]
        for number, ids in enumerate(found[:-1]):
            same[number] += ids == found[-1]
    return {f"early_{number}": count / len(asked) for number, count in enumerate(same, 1)}


def ask(engine: Engine, question: str, chosen: Namespace, stages: int) -> dict[str, Any]:
    """One cold answer and what it took. stages: 0 for no speculation."""
    engine._guesses = replace(engine._guesses, stages=stages)
    engine.clear_cache()
    time.sleep(PAUSE)
    before: Mapping[str, Any] = engine.stats()
    answer = engine.answer(question, strategy=chosen.strategy, top_k=chosen.top_k, max_tokens=1)
    engine.clear_cache()  # the engine's thread has counted by now
    after: Mapping[str, Any] = engine.stats()
    ended, begun = after["speculations_total"], before["speculations_total"]
    wasted = after["speculative_wasted_tokens_total"] - before["speculative_wasted_tokens_total"]
    return {
        "search_ms": answer.timings.retrieve, "exposed_ms": answer.timings.search_exposed,
        "ttft_ms": answer.timings.ttft, "prompt_tokens": answer.prompt_tokens,
        "chunks": [report.id for report in answer.segments], "wasted_tokens": wasted,
        **{name: int(ended.get(name, 0)) - int(begun.get(name, 0)) for name in ("hit", "wrong")},
    }  # fmt: skip


def measure(engine: Engine, asked: Sequence[str], chosen: Namespace) -> dict[str, Any]:
    """For each question (of `pairs`) its sample without speculation and that with it.

    Raises:
        ConfigError: if the two do not have the same chunks, which is a defect.
    """
    found = [[ask(engine, question, chosen, stages) for stages in (0, chosen.stages)] for question in asked]
    for question, (off, on) in zip(asked, found, strict=True):
        if off["chunks"] != on["chunks"]:
            raise ConfigError(f"speculation has other chunks: {question!r}")
    return {"pairs": found}


def row(pairs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of samples without and with speculation, and their ratios."""
    off, on = zip(*pairs, strict=True)
    made: dict[str, Any] = {"n": len(pairs), "prompt_tokens": float(median(sample["prompt_tokens"] for sample in on))}
    for name, ratio in (("exposed_ms", "less"), ("ttft_ms", "faster")):
        made[f"{name}_off"], made[name] = (float(median(sample[name] for sample in part)) for part in (off, on))
        made[ratio] = made[f"{name}_off"] / made[name]
    return made | {name: sum(sample[name] for sample in on) / len(on) for name in ("hit", "wrong", "wasted_tokens")}


def rows(engine: Engine, chosen: Namespace, session: Session) -> Iterator[dict[str, Any]]:
    engine.add_documents(documents(chosen.data, QUICK_DOCUMENTS if chosen.quick else None))
    base = engine.knowledge_base()
    samples = session.samples()
    progress = Progress(len(chosen.indexes) * len(chosen.sets) * len(chosen.stage_ms))
    for stages in (0, chosen.stages):  # what runs first pays for what is lazy
        ask(engine, "Is anybody there?", chosen, stages)
    for kind in chosen.indexes:
        index = open_index(base._database, None, IndexKind(kind), base._encoder.dim)
        for name in chosen.sets:
            everything = questions(chosen.data, name)
            asked = everything[:: max(len(everything) // chosen.limit, 1)][: chosen.limit]
            base._index = index
            known = early(base, everything, chosen.top_k, chosen.stages)
            for pause in chosen.stage_ms:
                base._index = Distant(index, chosen.stages, pause / 1e3)  # type: ignore[assignment]
                key = f"{kind}/{name}/{pause}"
                pairs = samples.of(key, partial(measure, engine, asked, chosen))["pairs"]
                progress.step(key)
                where = {"set": name, "index": kind, "documents": len(engine.document_ids())}
                yield {**where, "search_ms": pause * chosen.stages, **row(pairs), **known}


def panels(rows: Sequence[report.Row]) -> Iterator[plot.Panel]:
    """By the length of the search: two panels for each set, a pair of lines for each index."""

    def panel(axes: Any, name: str, what: str, label: str) -> None:
        ours = [row for row in rows if row["set"] == name]
        for number, kind in enumerate(dict.fromkeys(row["index"] for row in ours)):
            line = [row for row in ours if row["index"] == kind]
            x = [row["search_ms"] for row in line]
            axes.plot(x, [row[what + "_off"] for row in line], "--", color=f"C{number}", label=f"{kind}, without")
            axes.plot(x, [row[what] for row in line], "o-", color=f"C{number}", label=f"{kind}, with")
        axes.set_ylim(bottom=0)
        plot.label(axes, name, "search, ms", label)

    for name in dict.fromkeys(row["set"] for row in rows):
        yield partial(panel, name=name, what="exposed_ms", label="exposed search, ms")
        yield partial(panel, name=name, what="ttft_ms", label="time to first token, ms")


FIGURES: plot.Figures = {"speculation": ("Answers that begin before their search has ended", panels)}


def milliseconds(text: str) -> list[float]:
    with suppress(ValueError):
        found = [float(part) for part in text.split(",")]
        if min(found) > 0:
            return found
    raise argparse.ArgumentTypeError(f"{text!r}: give milliseconds above 0, separated by commas")


def options(flags: Parser) -> None:
    kinds, kept = report.among(list(IndexKind), "index"), ROOT / "build" / "benchmarks" / "union"
    flags.add("--data", type=report.existing_folder, required=True, metavar="DIR", help="a folder with text/SET")
    flags.add("--sets", type=report.listed, default=["nq_open", "mmlu"], metavar="A,B", help="question sets")
    flags.add("--indexes", type=kinds, default=["ivf", "hnsw"], metavar="A,B", help="kinds")
    flags.add("--stages", type=integer(2), default=STAGES, metavar="N", help="of a search")
    flags.add("--stage-ms", type=milliseconds, default=STAGE_MS, quick=STAGE_MS[-1:], help="sleep before each stage")
    flags.add("--top-k", type=integer(1), default=2, metavar="K", help="chunks of a prompt")
    flags.add("--strategy", default="prefix", metavar="NAME", help="how KV is reused")
    flags.add("--limit", type=integer(1), default=20, quick=4, metavar="N", help="questions of a set")
    flags.add("--index-dir", type=Path, default=kept, quick=kept / "quick", metavar="DIR",
              help="where the corpus is kept, embedded once")  # fmt: skip


def measured(chosen: Namespace, session: Session) -> Iterator[dict[str, Any]]:
    with Engine.load(chosen.model, dtype=chosen.dtype, index_dir=chosen.index_dir, progress=False) as engine:
        yield from rows(engine, chosen, session)


main = Benchmark("speculate", __doc__, COLUMNS, measured, options, model=True, figures=FIGURES).main

if __name__ == "__main__":
    sys.exit(main())
