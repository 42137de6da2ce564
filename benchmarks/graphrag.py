"""Questions over knowledge graphs: dependency attention beside self-attention, its answers, its work and its time.

    python -m benchmarks.graphrag --data DIR [--graphs DIR] [--sets a,b] [--parts work,length] [--limit N] [--runs N]
        [--model NAME_OR_PATH] [--dtype D] [--plot DIR] [--quick] [--json FILE]

DIR/kg/SET/questions.jsonl holds questions with topic entities, triples and gold paths; each gets at most 30 relation
paths of up to three hops from its entities, the gold ones among them, as `train.data` makes them (DepCache, section
3.3). A set that has text alone, DIR/text/SET, is asked over the graph that `python -m ragjax.retrieval.extract` made of
its documents, GRAPHS/SET.jsonl: entities are linked and paths retrieved as a server does it.

- accuracy (section 6.5): `self` is causal attention over the paths written out one a line, `tree` over the merged
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
  prompt tokens, and `prompt_tokens` the longest prompt's. Each request is answered with the cache and without, in
  turns; the system prompt is known to both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import dataset, plot_graphrag, report, score
from benchmarks.quality import packaged_encoder
from benchmarks.score import Bootstrap
from benchmarks.similarity import TextEncoder
from benchmarks.ttft import code_digest
from ragjax.core import Answer, ConfigError, Kind, Message, Prompt, RequestError
from ragjax.core.depprompt import layout
from ragjax.engine import Engine
from ragjax.engine.build import PAGE_SIZE
from ragjax.prompting.chat import graph_prompt
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.path import RelationPath, Subgraph, subgraphs_of
from ragjax.retrieval.reader import read
from ragjax.reuse.base import Strategy
from ragjax.reuse.dependency import Dependency
from train.data import Limits, from_question
from train.sample import MOST_ANSWERS

MODEL = "smollm2-135m-instruct"
SETS = "metaqa,geo_made,2wiki_evidence"
PARTS = ("work", "accuracy", "length", "workload")
LIMIT, QUICK_LIMIT = 100, 3
LIMITS = Limits()
RUNS = 5
LENGTHS = (1024, 2048, 4096, 8192)
FORCED = 12
"""Tokens of the first answer over which log-probabilities are taken."""

METHODS = {
    "self": ("full", False, None),
    "tree": ("full", True, None),
    "dependency/path": ("dependency", True, "path"),
    "dependency/preorder": ("dependency-preorder", True, "preorder"),
}
"""Of the part accuracy: strategy, whether paths are merged, positions."""

REQUESTS, QUICK_REQUESTS = 500, 20
ENTITIES = 10
CAPACITY = 0.2
COLUMNS = (
    "part", "set", "method", "positions", "n", "prompt_tokens", "accuracy", "logprob", "top1", "logprob_minus_self",
    "logprob_minus_self_lo", "logprob_minus_self_hi", "visited_share", "predicted_share", "ttft_ms", "faster",
    "hit_rate", "capacity_share",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question, what answers it, and the paths it gets."""

    id: str
    text: str
    answers: tuple[str, ...]
    subgraphs: tuple[Subgraph, ...]


def questions_of(
    folder: Path, name: str, limit: int | None, limits: Limits = LIMITS, only: Container[str] | None = None
) -> list[Question]:
    """The first questions of a set that have a path and an answer; all of them without a limit.

    limits: of their paths. only: ids that count.

    Raises:
        ConfigError: if there is no such set.
    """
    file = folder / "kg" / name / "questions.jsonl"
    if not file.exists():
        known = ", ".join(sorted(path.parent.name for path in folder.glob("kg/*/questions.jsonl"))) or "none"
        raise ConfigError(f"{file} does not exist; sets of {folder}: {known}")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        value = json.loads(line)
        try:
            sample = from_question(value, limits, 0, number)
        except ValueError:
            continue  # a question without any path is none for a graph
        if only is not None and sample.id not in only:
            continue
        answers = tuple(str(answer) for answer in value["answers"])
        found.append(Question(sample.id, sample.question, answers, subgraphs_of(map(RelationPath, sample.paths))))
        if len(found) == limit:
            break
    return found


def extracted(folder: Path, name: str, limit: int, triples: Path, encoder: TextEncoder) -> list[Question]:
    """The first questions of a set of text that are about an entity of the graph extracted from it.

    Raises:
        ConfigError: if there is no such set, or its triples cannot be read.
    """
    found = []
    with KnowledgeGraph.open(None, encoder) as graph:
        graph.add(read(triples))
        for question in dataset.load(folder, name).questions:
            subgraphs = graph.subgraphs(question.text)
            if subgraphs and len(found) < limit:
                found.append(Question(question.id, question.text, question.answers, tuple(subgraphs)))
    return found


def prompt_of(engine: Engine, question: Question, trees: bool) -> Prompt:
    """As serving makes it."""
    return graph_prompt(engine.tokenizer, (Message("user", question.text),), question.subgraphs, trees=trees)


# -------------------------------------------------------------------------------------------- work


def work(engine: Engine, name: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Pairs that attend, over all questions of a set, by bucket of written out length."""
    counted = [pairs(prompt_of(engine, q, trees=False), prompt_of(engine, q, trees=True), q) for q in questions]
    made = []
    for low, high in ((0, 512), (512, 1024), (1024, 2**30), (0, 2**30)):
        part = [c for c in counted if low <= c["self_tokens"] < high]
        if not part:
            continue
        total = {key: float(sum(c[key] for c in part)) for key in part[0]}
        made.append(
            {
                "part": "work",
                "set": name,
                "method": "dependency",
                "positions": None,
                "n": len(part),
                "least_tokens": low,
                "prompt_tokens": total["self_tokens"] / len(part),
                "merged_tokens": total["tree_tokens"] / len(part),
                "visited_share": total["visited"] / total["self"],
                "shared_prefix": (total["self"] - total["tree"]) / total["self"],
                "non_dependent": (total["tree"] - total["visited"]) / total["self"],
                "predicted_share": total["predicted"] / total["predicted_self"],
            }
        )
    return made


def pairs(written: Prompt, merged: Prompt, question: Question) -> dict[str, int | float]:
    """Visible pairs of one question: written out, merged, merged under the mask; and what the paper's formulas say."""
    n, m = len(written), len(merged)
    own, self_ = predicted(merged, question)
    return {
        "self_tokens": n,
        "tree_tokens": m,
        "self": n * (n + 1) // 2,
        "tree": m * (m + 1) // 2,
        "visited": visited(merged),
        "predicted": own,
        "predicted_self": self_,
    }


def visited(merged: Prompt) -> int:
    """Pairs of tokens that attend to each other under the mask."""
    m, view = len(merged), layout(merged, "path")
    hidden = np.minimum(view.hide_until, m) - view.hide_from
    return m * (m + 1) // 2 - int(hidden.sum())


def predicted(merged: Prompt, question: Question) -> tuple[float, float]:
    """Section 3.2 for the context alone: N M² + N K (L² - M²) and (N K L)².

    N entities, K paths of each, L tokens of a path, M of them common to all: means over the question.
    """
    trees: dict[str, list[tuple[int, bool]]] = {}
    depth: dict[int, int] = {}
    inner = {j for s in merged.segments for j in s.depends or ()}
    for i, segment in enumerate(merged.segments):
        if segment.kind is not Kind.NODE:
            continue
        depth[i] = len(segment) + (depth[segment.depends[0]] if segment.depends else 0)
        trees.setdefault(segment.id, []).append((depth[i], i not in inner))
    n = len(trees)
    k = float(np.mean([len(subgraph.paths) for subgraph in question.subgraphs]))
    length = float(np.mean([d for nodes in trees.values() for d, leaf in nodes if leaf]))
    common = float(np.mean([nodes[0][0] if len(nodes) > 1 else nodes[0][0] - 1 for nodes in trees.values()]))
    return n * common**2 + n * k * (length**2 - common**2), (n * k * length) ** 2


# ---------------------------------------------------------------------------------------- accuracy


def accuracy(
    engine: Engine, name: str, questions: Sequence[Question], samples: report.Samples, progress: report.Progress
) -> list[dict[str, Any]]:
    """Every method on every question; a row for each method."""
    found: dict[str, list[Mapping[str, float]]] = {method: [] for method in METHODS}
    for question in questions:
        fresh = False
        for method, (strategy, trees, _) in METHODS.items():
            key = f"{name}/{question.id}/{method}"
            sample = samples.get(key)
            if sample is None:
                fresh, sample = True, answered(engine, question, strategy, prompt_of(engine, question, trees))
                samples.put(key, sample)
            found[method].append(sample)
        if fresh:
            progress.step(f"{name}: {question.id}")
        else:
            progress.skip()
    return list(accuracy_rows(name, found))


def answered(engine: Engine, question: Question, strategy: str | Strategy, prompt: Prompt) -> dict[str, float]:
    """One question over one prompt."""
    reference = engine.tokenizer.encode(question.answers[0], special=False, continued=True)[:FORCED]
    answer = engine.answer_prompt(prompt, strategy=strategy, max_tokens=24, continuation=reference)
    assert answer.scores is not None
    logits = answer.scores.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    logprob = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return {
        "accuracy": score.answered(answer.text, question.answers),
        "f1": score.f1(answer.text, [", ".join(question.answers[:MOST_ANSWERS])]),
        "logprob": float(logprob[np.arange(len(reference)), reference].mean()),
        "top1": float((logits.argmax(-1) == reference).mean()),
        "prompt_tokens": answer.prompt_tokens,
        "hit_rate": answer.cached_tokens / answer.prompt_tokens,
        "ttft_ms": answer.timings.ttft,
    }


def accuracy_rows(name: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[dict[str, Any]]:
    """A row for each method, with paired intervals."""
    bootstrap = Bootstrap([name] * len(found["self"]))

    def values(method: str, metric: str) -> list[float]:
        return [sample[metric] for sample in found[method]]

    for method, (_, _, positions) in METHODS.items():
        made: dict[str, Any] = {
            "part": "accuracy",
            "set": name,
            "method": method.partition("/")[0],
            "positions": positions,
            "n": len(found[method]),
            "prompt_tokens": float(np.mean(values(method, "prompt_tokens"))),
        }
        for metric in ("accuracy", "logprob", "top1"):
            mine = values(method, metric)
            made |= bootstrap.mean(mine).columns(metric)
            made |= bootstrap.difference(mine, values("self", metric)).columns(f"{metric}_minus_self")
            if positions == "path":
                other = values("dependency/preorder", metric)
                made |= bootstrap.difference(mine, other).columns(f"{metric}_minus_preorder")
        yield made


# ------------------------------------------------------------------------------------------ length


def lengthened(engine: Engine, questions: Sequence[Question], tokens: int, seed: int) -> Question | None:
    """A question whose paths and those of others take about so many tokens written out; None if there are too few."""
    order = np.random.default_rng(seed).permutation(len(questions))
    first, subgraphs = questions[order[0]], {}
    for i in order:
        for subgraph in questions[i].subgraphs:
            subgraphs.setdefault(subgraph.entity, subgraph)
        made = Question(first.id, first.text, first.answers, tuple(subgraphs.values()))
        if len(prompt_of(engine, made, trees=False)) >= tokens:
            return _cut(engine, made, tokens)
    return None


def _cut(engine: Engine, question: Question, tokens: int) -> Question:
    """Its paths, of the last entity as many as fit."""
    *before, last = question.subgraphs
    for count in range(len(last.paths), -1, -1):
        kept = (*before, *((Subgraph(last.entity, last.paths[:count]),) if count else ()))
        made = Question(question.id, question.text, question.answers, kept)
        if len(prompt_of(engine, made, trees=False)) <= tokens:
            return made
    return made


def length(engine: Engine, name: str, questions: Sequence[Question], runs: int) -> list[dict[str, Any]]:
    """Time to first token by prompt length; methods take turns within a run."""
    made = []
    for tokens in (n for n in LENGTHS if n <= engine.context_length - 8):
        found: dict[str, list[tuple[float, Answer]]] = {}
        shares: list[float] = []
        for run in range(runs + 1):
            question = lengthened(engine, questions, tokens, run)
            if question is None:
                break
            written, merged = (prompt_of(engine, question, trees) for trees in (False, True))
            try:
                answers = list(first_tokens(engine, question))
            except RequestError as error:  # paths of too many entities, each a passage of its own when written out
                print(f"{name}: no {tokens} tokens: {error}", file=sys.stderr)
                found.clear()
                break
            shares.append(visited(merged) / (len(written) * (len(written) + 1) // 2))
            for method, answer in answers if run else ():  # what runs first pays for what is lazy
                found.setdefault(method, []).append((answer.timings.ttft, answer))
        full = np.array([t for t, _ in found.get("self", ())])
        for method, timed in found.items():
            mine = np.array([t for t, _ in timed])
            made.append(
                {
                    "part": "length",
                    "set": name,
                    "method": method.partition("/")[0],
                    "positions": (method.partition("/")[2] or None),
                    "n": len(timed),
                    "written_tokens": tokens,
                    "visited_share": float(np.mean(shares)),
                    "prompt_tokens": float(np.mean([a.prompt_tokens for _, a in timed])),
                    "hit_rate": float(np.mean([a.cached_tokens / a.prompt_tokens for _, a in timed])),
                    "ttft_ms": float(np.median(mine)),
                    "faster": float(np.median(full) / np.median(mine)),
                }
            )
    return made


def first_tokens(engine: Engine, question: Question) -> Iterator[tuple[str, Answer]]:
    """One question by every method, nothing known and everything known."""
    written, merged = (prompt_of(engine, question, trees) for trees in (False, True))
    warm = {"self-prefix": ("prefix", written)}
    for positions in ("path", "preorder"):
        strategy = "dependency" if positions == "path" else "dependency-preorder"
        warm[f"dependency-cached/{positions}"] = (strategy, merged)
    engine.clear_cache()
    yield "self", engine.answer_prompt(written, strategy="full", max_tokens=1)
    for method, (strategy, prompt) in warm.items():
        engine.clear_cache()
        cold = engine.answer_prompt(prompt, strategy=strategy, max_tokens=1)
        if strategy != "prefix":
            yield method.replace("-cached", ""), cold
        yield method, engine.answer_prompt(prompt, strategy=strategy, max_tokens=1)


# ---------------------------------------------------------------------------------------- workload


class Uncached(Dependency):
    """Dependency attention that finds and keeps no branch."""

    def _match(self, *_: Any) -> dict[int, Any]:
        return {}

    def _admit(self, *_: Any) -> None:
        pass


def requests(questions: Sequence[Question], count: int, seed: int = 0) -> list[Question]:
    """Questions of ten entities each, entities drawn after Zipf without repetition (DepCache, section 6.1)."""
    entities = list({s.entity: s for q in questions for s in q.subgraphs}.values())
    random = np.random.default_rng(seed)
    weight = 1 / np.arange(1, len(entities) + 1)
    order = random.permutation(len(entities))
    drawn = []
    for number in range(count):
        chosen = random.choice(len(entities), min(ENTITIES, len(entities)), replace=False, p=weight / weight.sum())
        first = questions[number % len(questions)]
        subgraphs = tuple(entities[order[i]] for i in chosen)
        drawn.append(Question(f"{number}", first.text, first.answers, subgraphs))
    return drawn


def capacity(everything: int, longest: int) -> tuple[int, int]:
    """(tokens of the device cache, context) where the entities take `everything` and the longest prompt `longest`."""
    context = longest + PAGE_SIZE
    return max(int(CAPACITY * everything), context + PAGE_SIZE) + 2 * PAGE_SIZE, context  # one page holds nothing


def workload(
    chosen: argparse.Namespace, name: str, questions: Sequence[Question], progress: report.Progress
) -> list[dict[str, Any]]:
    """Hit rate and time to first token over a stream of requests, with a cache of a fifth of the data."""
    asked = requests(questions, QUICK_REQUESTS if chosen.quick else REQUESTS)
    made: dict[str, list[tuple[float, float]]] = {"dependency": [], "dependency-cached": []}
    with opened(chosen.model, chosen.dtype) as engine:
        whole = {s.entity: s for q in asked for s in q.subgraphs}
        prompts = (prompt_of(engine, Question("", "?", ("",), (s,)), trees=True) for s in whole.values())
        everything = sum(len(s) for prompt in prompts for s in prompt.segments if s.kind is Kind.NODE)
        longest = max(len(prompt_of(engine, q, trees=True)) for q in asked)
        per_token = engine._runner.config.kv_bytes_per_token(2)
    tokens, context = capacity(everything, longest)
    with opened(chosen.model, chosen.dtype, tokens * per_token / 2**30, context) as engine:
        pool = engine._cache.pool
        for question in asked:
            prompt = prompt_of(engine, question, trees=True)
            cached = engine.answer_prompt(prompt, strategy="dependency", max_tokens=1)
            alone = engine.answer_prompt(prompt, strategy=Uncached(), max_tokens=1)
            for method, answer in (("dependency-cached", cached), ("dependency", alone)):
                made[method].append((answer.timings.ttft, answer.cached_tokens / answer.prompt_tokens))
            progress.step(f"{name}: request {question.id}")
    alone_ms = np.array([t for t, _ in made["dependency"]])
    return [
        {
            "part": "workload",
            "set": name,
            "method": method,
            "positions": "path",
            "n": len(samples),
            "prompt_tokens": float(longest),
            "capacity_tokens": float(pool.capacity * pool.page_size),
            "capacity_share": pool.capacity * pool.page_size / everything,
            "hit_rate": float(np.mean([hit for _, hit in samples])),
            "ttft_ms": float(np.median([t for t, _ in samples])),
            "faster": float(np.median(alone_ms) / np.median([t for t, _ in samples])),
        }
        for method, samples in made.items()
    ]


# ------------------------------------------------------------------------------------ command line


def opened(model: str, dtype: str, gigabytes: float = 0.5, context: int | None = None) -> Engine:
    """An engine whose requests are dependency attention by default."""
    return Engine.load(model, strategy="dependency", dtype=dtype, device_cache_gb=gigabytes, max_context=context)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    flags = report.parser("graphrag", (__doc__ or "").partition("\n")[0])
    add = flags.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="a folder with kg/SET/questions.jsonl")
    add("--graphs", type=Path, metavar="DIR", help="triples extracted from sets of text: SET.jsonl, .tsv or .nt")
    add("--sets", default=SETS, metavar="A,B", help="sets of the folder (%(default)s)")
    add("--parts", default=",".join(PARTS), metavar="A,B", help="what to measure (%(default)s)")
    add("--limit", type=int, metavar="N", help=f"questions a set ({LIMIT}; {QUICK_LIMIT} with --quick)")
    add("--runs", type=int, default=RUNS, metavar="N", help="timed runs of each length (%(default)s)")
    add("--model", default=MODEL, metavar="NAME_OR_PATH", help="model (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of weights and KV (%(default)s)")
    add("--plot", type=Path, metavar="DIR", help="also draw the paper's figures")
    chosen = flags.parse_args(arguments)
    if chosen.limit is None:
        chosen.limit = QUICK_LIMIT if chosen.quick else LIMIT
    chosen.sets, chosen.parts = chosen.sets.split(","), chosen.parts.split(",")
    unknown = [part for part in chosen.parts if part not in PARTS]
    if unknown:
        flags.error(f"unknown part {unknown[0]!r}; choose among {', '.join(PARTS)}")
    if chosen.quick:
        chosen.sets, chosen.runs = chosen.sets[:1], 1
    if min(chosen.limit, chosen.runs) < 1:
        flags.error("--limit and --runs must be at least 1")
    return chosen


def run(chosen: argparse.Namespace, samples: report.Samples) -> list[dict[str, Any]]:
    """Measure every part on every set; the rows."""
    sets = {name: _questions(chosen, name) for name in chosen.sets}
    empty = [name for name, questions in sets.items() if not questions]
    if empty:
        raise ConfigError(f"no question of {empty[0]} has a path")
    made: list[dict[str, Any]] = []
    parts = {"work", "accuracy", "length"} & set(chosen.parts)
    if parts:
        with opened(chosen.model, chosen.dtype) as engine:
            progress = report.Progress(sum(map(len, sets.values())))
            for name, questions in sets.items():
                if "work" in parts:
                    made += work(engine, name, questions)
                if "accuracy" in parts:
                    made += accuracy(engine, name, questions, samples, progress)
                if "length" in parts:
                    made += length(engine, name, questions, chosen.runs)
    if "workload" in chosen.parts:
        progress = report.Progress(len(sets) * (QUICK_REQUESTS if chosen.quick else REQUESTS))
        for name, questions in sets.items():
            made += workload(chosen, name, questions, progress)
    return made


def _questions(chosen: argparse.Namespace, name: str) -> list[Question]:
    places = [] if chosen.graphs is None else [chosen.graphs / f"{name}{kind}" for kind in (".jsonl", ".tsv", ".nt")]
    triples = next((place for place in places if place.is_file()), None)
    if triples is None:
        return questions_of(chosen.data, name, chosen.limit)
    return extracted(chosen.data, name, chosen.limit, triples, packaged_encoder())


def settings_of(chosen: argparse.Namespace, head: report.Header, models: Sequence[str], *names: str) -> dict[str, Any]:
    """What a question's samples depend on: flags that name models, flags of these names, and what it runs on."""
    kept = {name: str(getattr(chosen, name)) for name in ("dtype", "data", *names)}
    kept |= {name: report.weights_of(getattr(chosen, name)) for name in models}
    return {**kept, "machine": head.machine["cpu"], "versions": head.versions, "code": code_digest()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = options(arguments)

    def settings(head: report.Header) -> dict[str, Any]:
        return settings_of(chosen, head, ("model",), "graphs")

    made = report.sampled("graphrag", COLUMNS, chosen.json, settings, partial(run, chosen))
    if made is None:
        return 1
    if chosen.plot is not None:
        plot_graphrag.report_figures(made, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
