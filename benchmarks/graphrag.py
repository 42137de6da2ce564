"""Questions over knowledge graphs: dependency attention beside self-attention, its answers, its work and its time.

DIR/kg/SET/questions.jsonl holds questions with topic entities, triples and gold paths; each gets at most 30 relation
paths of up to three hops from its entities, the gold ones among them, as `train.data` makes them (DepCache, section
3.3). A set that has text alone, DIR/text/SET, is asked over the graph that `ragjax extract` made of
its documents, GRAPHS/SET.jsonl: entities are linked and paths retrieved as a server does it.

- accuracy (section 6.5): `self` is causal attention over the paths written out one a line, `streaming` StreamingLLM's
  over the same, with a window of a fifth of the prompt, `communities` full attention over the five communities of the
  set's facts that are most similar to the question (Figure 15); `tree` over the merged
  tree of their tokens, `dependency` over the same tree under its mask, for both schemes of positions. `logprob` is
  the mean over the tokens of the first answer, `top1` the share of them that the model likes best; `accuracy` whether
  one of the answers occurs in what it generates. Intervals are 95% paired bootstrap intervals over questions;
  `_minus_self` and, for `path`, `_minus_preorder` are paired differences.
- work (Figure 3, section 3.2): pairs of tokens that attend to each other, as shares of
  self-attention's over the same paths: `visited_share`; what is left out is split into pairs whose key is no ancestor
  (`non_dependent`) and pairs that the tree says once (`shared_prefix`). `predicted_share` is the paper's formula for
  the same paths.
- length (section 6.3): time to first token for prompts of 1K to 8K tokens (of the written out paths), made of several
  questions' subgraphs, another one each run, and `visited_share` of these; `self-prefix` is `prefix` when the whole
  prompt is known, `dependency-cached` when every branch is. `faster` is the ratio of the medians.
- workload (section 6.3): 500 requests for 10 entities each, Zipf, with a device cache of 20% of the entities' KV, or
  of what one request needs if that is more (`capacity_share`); `hit_rate` is the mean over requests of hit tokens over
  prompt tokens, and `prompt_tokens` the longest merged prompt's. Each request is answered with the cache and without,
  and over the paths written out by `self` and `streaming`, in turns; the system prompt is known to the first two.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress, Samples, weights_of
from benchmarks.graph.part import accuracy, length, requests, work, workload
from benchmarks.graph.question import LIMIT, QUICK_LIMIT, SETS, Question, extracted, opened, questions_of
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import ConfigError

PARTS = ("work", "accuracy", "length", "workload")
COLUMNS = (
    "part", "set", "method", "positions", "n", "prompt_tokens", "accuracy", "logprob", "top1", "logprob_minus_self",
    "logprob_minus_self_lo", "logprob_minus_self_hi", "visited_share", "predicted_share", "ttft_ms", "faster",
    "hit_rate", "capacity_share",
)  # fmt: skip


def options(flags: Parser) -> None:
    flags.add("--data", type=Path, required=True, metavar="DIR", help="a folder with kg/SET/questions.jsonl")
    flags.add("--graphs", type=Path, metavar="DIR", help="triples extracted from sets of text: SET.jsonl, .tsv or .nt")
    flags.add("--sets", type=report.listed, default=SETS, quick=SETS[:1], metavar="A,B", help="sets of the folder")
    flags.add("--parts", type=report.among(PARTS, "part"), default=PARTS, metavar="A,B", help="what to measure")
    flags.add("--limit", type=integer(1), default=LIMIT, quick=QUICK_LIMIT, metavar="N", help="questions a set")
    flags.add("--requests", type=integer(1), default=500, quick=20, metavar="N", help="requests of the workload")
    flags.add("--runs", type=integer(1), default=5, quick=1, metavar="N", help="timed runs of each length")


def run(chosen: Namespace, samples: Samples) -> list[dict[str, Any]]:
    sets = {name: _questions(chosen, name) for name in chosen.sets}
    empty = [name for name, questions in sets.items() if not questions]
    if empty:
        raise ConfigError(f"no question of {empty[0]} has a path")
    made: list[dict[str, Any]] = []
    parts = {"work", "accuracy", "length"} & set(chosen.parts)
    if parts:
        with opened(chosen.model, chosen.dtype) as engine:
            progress = Progress(sum(map(len, sets.values())))
            for name, questions in sets.items():
                if "work" in parts:
                    made += work(engine, name, questions)
                if "accuracy" in parts:
                    made += accuracy(engine, name, questions, samples, progress)
                if "length" in parts:
                    made += length(engine, name, questions, chosen.runs)
    if "workload" in chosen.parts:
        progress = Progress(len(sets) * chosen.requests)
        for name, questions in sets.items():
            made += workload(chosen.model, chosen.dtype, name, requests(questions, chosen.requests), progress)
    return made


def _questions(chosen: Namespace, name: str) -> list[Question]:
    places = [] if chosen.graphs is None else [chosen.graphs / f"{name}{kind}" for kind in (".jsonl", ".tsv", ".nt")]
    triples = next((place for place in places if place.is_file()), None)
    if triples is None:
        return questions_of(chosen.data, name, chosen.limit)
    return extracted(chosen.data, name, chosen.limit, triples, packaged_encoder())


def settings_of(chosen: Namespace) -> dict[str, Any]:
    """What a question's samples depend on: sets and parts may be added to a stopped run."""
    kept = {name: str(getattr(chosen, name)) for name in ("dtype", "data", "graphs")}
    return {**kept, "model": weights_of(chosen.model)}


def measure(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    return run(chosen, session.samples(settings_of(chosen)))


BENCHMARK = Benchmark("graphrag", __doc__, COLUMNS, measure, options, model=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
