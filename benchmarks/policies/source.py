"""Where workloads come from: graph entities, documents, and traces.

Graph entities follow DepCache, section 6.1 (500 queries of 10 entities, up to 30 two-hop paths each); documents follow
RAGCache, section 7 (arXiv:2404.12457); the traces are Mooncake's (Qin et al., FAST 2025). Azure's
traces are left out: they carry arrivals and lengths, and nothing that says which requests share a prefix.

No model is asked: a text is as many tokens as `words` finds in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.questions import read_lines
from ragjax.core import ConfigError


@dataclass(frozen=True, slots=True)
class Request:
    nodes: tuple[int, ...]  # what it uses of the tree, parents first
    other: int = 0  # tokens computed each time and never kept (the question)
    documents: int = 0  # retrieved; more than its document nodes where some are not to be kept
    answer: int = -1  # node of its answer, below that of its question (-1: neither is kept)


@dataclass(frozen=True)
class Workload:
    """Requests over a tree of runs. Node n has sizes[n] tokens and hangs under parents[n] (-1: none) < n."""

    name: str
    parents: tuple[int, ...]
    sizes: tuple[int, ...]
    documents: tuple[bool, ...]  # whether a node counts as a retrieved document
    requests: tuple[Request, ...]
    distinct: int  # tokens of the data, for capacities
    top_k: int | None = None  # documents retrieved for each request
    keep: int | None = None  # how many of them may be kept (None: all)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each request, the never kept ones included."""
        return tuple(sum(self.sizes[n] for n in r.nodes) + r.other for r in self.requests)

    def kept_whole(self, answer: int) -> Workload:
        """The workload whose requests keep their question and an answer of so many tokens too."""
        parents, sizes, documents = list(self.parents), list(self.sizes), list(self.documents)

        def whole(request: Request) -> Request:
            question = len(sizes)
            parents.extend((request.nodes[-1], question))
            sizes.extend((request.other, answer))
            documents.extend((False, False))
            return replace(request, nodes=(*request.nodes, question), other=0, answer=question + 1)

        asked = {request: whole(request) for request in dict.fromkeys(self.requests)}
        return replace(
            self,
            parents=tuple(parents),
            sizes=tuple(sizes),
            documents=tuple(documents),
            requests=tuple(asked[request] for request in self.requests),
        )

    def limited(self, count: int | None) -> Workload:
        """The first `count` requests (None: all), whose distinct tokens are those that they have."""
        served = self.requests[:count]
        if len(served) == len(self.requests):
            return self
        nodes = {node for request in served for node in request.nodes}
        return replace(self, requests=served, distinct=sum(self.sizes[node] for node in nodes))


class Forest:
    """Builds the tree of a workload: the same label under the same parent is the same node."""

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.documents: list[bool] = []
        self._at: dict[tuple[int, Hashable], int] = {}

    def child(self, parent: int, label: Hashable, tokens: int, document: bool = False) -> int:
        """The node with this label under `parent` (-1: at the top), made if there is none."""
        found = self._at.setdefault((parent, label), len(self.sizes))
        if found == len(self.sizes):
            if tokens < 1:
                raise ValueError(f"a node holds at least one token, not {tokens} ({label!r})")
            self.parents.append(parent)
            self.sizes.append(tokens)
            self.documents.append(document)
        return found

    def workload(self, name: str, requests: Iterable[Request], distinct: int | None = None) -> Workload:
        """The finished workload; `distinct` is all tokens of the tree unless it is given."""
        served = tuple(requests)  # first: they may be made, and the tree with them, while they are read
        total = sum(self.sizes) if distinct is None else distinct
        return Workload(name, tuple(self.parents), tuple(self.sizes), tuple(self.documents), served, total)


@dataclass(frozen=True)
class Pattern:
    """Which items the requests ask for; each draws without repetition."""

    skew: float = 0.0  # Zipf exponent of the items' popularity (0: all alike)
    recent: float = 0.0  # probability that a draw repeats an item of an earlier request
    memory: float = 1.0  # mean of how many requests ago that was, which is geometric

    def draw(self, items: int, per_request: int, requests: int, seed: int) -> list[list[int]]:
        if not 0 < per_request <= items:
            raise ValueError(f"per_request must be 1 to {items} (the number of items), not {per_request}")
        random = np.random.default_rng(seed)
        weights = np.arange(1, items + 1) ** -self.skew
        order, shares = random.permutation(items), weights / weights.sum()
        drawn: list[list[int]] = []
        for _ in range(requests):
            chosen: dict[int, None] = {}
            while len(chosen) < per_request:
                chosen.setdefault(self._one(random, drawn, order, shares))
            drawn.append(list(chosen))
        return drawn

    def _one(self, random: np.random.Generator, drawn: list[list[int]], order: Any, shares: Any) -> int:
        if drawn and random.random() < self.recent:
            age = int(random.geometric(1 / self.memory))
            if age <= len(drawn):
                return int(random.choice(drawn[-age]))
        return int(order[random.choice(len(order), p=shares)])


PATTERNS = {"uniform": Pattern(), "zipf": Pattern(skew=1.0), "temporal": Pattern(recent=0.6, memory=10.0)}
"""DepCache names the patterns and not their parameters: these are ours.

Zipf with exponent 1; temporal repeats an item with probability 0.6, on average of ten requests ago.
"""


SYSTEM_TOKENS = 32  # length of the system prompt that generated requests begin with
BLOCK_TOKENS = 512  # tokens that one hash of a Mooncake trace stands for


def words(text: str) -> list[str]:
    """Runs of letters and digits, and single other signs: a stand-in for a tokenizer that needs no model."""
    return re.findall(r"\w+|[^\w\s]", text)


Triple = tuple[str, str, str]
Graph = Mapping[str, Sequence[tuple[str, str]]]


def read_triples(path: Path) -> list[Triple]:
    """Triples (head, relation, tail) of a .tsv file, or of a `questions.jsonl` with a `triples` field."""
    if path.suffix == ".jsonl":
        return sorted({(h, r, t) for question in read_lines(path, "triples") for h, r, t in question["triples"]})
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split("\t")
        if len(parts) != 3:
            raise ConfigError(f"{path}:{number}: {len(parts)} fields instead of head, relation and tail")
        found.append((parts[0], parts[1], parts[2]))
    return found


def graph_of(triples: Iterable[Triple]) -> Graph:
    """Out-edges (relation, tail) by head, in the order of the triples, each once."""
    edges: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    for head, relation, tail in triples:
        edges[head].setdefault((relation, tail))
    return {head: tuple(out) for head, out in edges.items()}


def two_hop_paths(graph: Graph, entity: str, limit: int = 30) -> list[tuple[str, ...]]:
    """The first `limit` paths of two relations from an entity; one relation where the first tail leads nowhere."""
    found: list[tuple[str, ...]] = []
    for relation, tail in graph.get(entity, ()):
        for onward in graph.get(tail, ()) or ((),):
            found.append((entity, relation, tail, *onward))
            if len(found) == limit:
                return found
    return found


def entities(
    graph: Graph, pattern: str, *, count: int = 1000, queries: int = 500, per_query: int = 10, seed: int = 0
) -> Workload:
    """Queries over subgraphs: each entity's paths form a tree of runs under the system prompt, as DepCache has them.

    count: size of the pool that entities are drawn from, chosen at random among the graph's heads.
    """
    heads = sorted(graph)
    chosen = np.random.default_rng(seed).permutation(len(heads))[:count]
    paths = [[_spelt(path) for path in two_hop_paths(graph, heads[i])] for i in chosen]
    forest = Forest()
    system = forest.child(-1, "system", SYSTEM_TOKENS)
    pool = _compressed(forest, system, paths)
    drawn = PATTERNS[pattern].draw(len(pool), min(per_query, len(pool)), queries, seed + 1)
    requests = [Request((system, *dict.fromkeys(n for item in items for n in pool[item]))) for items in drawn]
    return forest.workload(pattern, requests)


def _spelt(path: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for part in path for word in words(part))


def _compressed(forest: Forest, top: int, groups: Sequence[Sequence[tuple[str, ...]]]) -> list[list[int]]:
    """Hang all paths of all groups below `top` as one prefix tree with one node per unbranched run of words.

    Returns each group's nodes, parents first.
    """
    branches, stops = _branching(groups)
    found = []
    for paths in groups:
        nodes: dict[int, None] = {}
        for path in paths:
            parent, begin = top, 0
            for end in range(1, len(path) + 1):
                if path[:end] in stops or branches[path[:end]] > 1:
                    parent = forest.child(parent, path[begin:end], end - begin)
                    nodes.setdefault(parent)
                    begin = end
        found.append(list(nodes))
    return found


def _branching(groups: Sequence[Sequence[tuple[str, ...]]]) -> tuple[Counter[tuple[str, ...]], set[tuple[str, ...]]]:
    prefixes = {path[:end] for paths in groups for path in paths for end in range(1, len(path) + 1)}
    return Counter(prefix[:-1] for prefix in prefixes), {path for paths in groups for path in paths}


@dataclass(frozen=True)
class Corpus:
    """Documents by id, and questions over them."""

    name: str
    documents: Mapping[str, str]
    questions: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, limit: int | None = None) -> Corpus:
        documents = {
            d["id"]: f"{d['title']} {d['text']}".strip()
            for d in read_lines(folder / "corpus.jsonl", "id", "title", "text")
        }
        asked = list(read_lines(folder / "questions.jsonl", "question"))[:limit]
        return cls(folder.name, documents, tuple(q["question"] for q in asked))

    @classmethod
    def union(cls, corpora: Sequence[Corpus], name: str = "documents") -> Corpus:
        documents = {key: text for corpus in corpora for key, text in corpus.documents.items()}
        return cls(name, documents, tuple(q for corpus in corpora for q in corpus.questions))


def corpora(data: Path, limit: int | None = None) -> list[Corpus]:
    return [Corpus.read(path.parent, limit) for path in sorted(data.glob("text/*/corpus.jsonl"))]


def bm25(corpus: Corpus, k: int, saturation: float = 1.2, length_weight: float = 0.75) -> list[list[str]]:
    """For each question the ids of the `k` best documents, best first (Robertson and Zaragoza 2009)."""
    ids = list(corpus.documents)
    counts = [Counter(w.lower() for w in words(text)) for text in corpus.documents.values()]
    lengths = np.array([c.total() for c in counts], np.float64)
    asked = [{w.lower() for w in words(question)} for question in corpus.questions]
    wanted = set().union(*asked)
    postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, count in enumerate(counts):
        for word in wanted & count.keys():
            postings[word].append((number, count[word]))
    norm = saturation * (1 - length_weight + length_weight * lengths / max(lengths.mean(), 1))
    weights = {word: _bm25_weights(np.array(listed).T, norm, saturation) for word, listed in postings.items()}
    found = []
    for question in asked:
        scores = np.zeros(len(ids))
        for word in sorted(question & weights.keys()):  # in one order, so that sums round alike in every run
            at, weight = weights[word]
            scores[at] += weight
        found.append([ids[i] for i in np.argsort(-scores, kind="stable")[:k]])
    return found


def _bm25_weights(listed: Any, norm: Any, saturation: float) -> tuple[Any, Any]:
    at, times = listed
    rarity = math.log(1 + (len(norm) - len(at) + 0.5) / (len(at) + 0.5))
    return at, rarity * times * (saturation + 1) / (times + norm[at])


def documents(
    corpus: Corpus,
    retrieved: Sequence[Sequence[str]],
    top_k: int,
    *,
    keep: int | None = None,
    requests: int = 5000,
    pattern: Pattern = PATTERNS["zipf"],
    seed: int = 0,
) -> Workload:
    """Repeated questions, each a chain system → d1 → d2 → … of its `top_k` documents, as RAGCache asks them.

    retrieved: ids for each question, best first. keep: how many of them may be kept (all).
    distinct: tokens of the documents that are retrieved at all, each counted once.
    """
    sizes = {key: len(words(text)) for key, text in corpus.documents.items()}
    forest = Forest()
    system = forest.child(-1, "system", SYSTEM_TOKENS)
    made = [
        _chain(forest, system, ids[:top_k], sizes, keep, len(words(question)))
        for question, ids in zip(corpus.questions, retrieved, strict=True)
    ]
    drawn = pattern.draw(len(made), 1, requests, seed)
    distinct = sum(sizes[key] for key in {key for ids in retrieved for key in ids[:top_k]})
    work = forest.workload(corpus.name, (made[item] for (item,) in drawn), distinct + SYSTEM_TOKENS)
    return replace(work, top_k=top_k, keep=keep)


def _chain(
    forest: Forest, parent: int, ids: Sequence[str], sizes: Mapping[str, int], keep: int | None, question: int
) -> Request:
    nodes = [parent]
    kept = [key for key in ids if sizes[key]][:keep]
    for key in kept:
        nodes.append(forest.child(nodes[-1], key, sizes[key], document=True))
    return Request(tuple(nodes), question + sum(sizes[key] for key in ids[len(kept) :]), len(ids))


def mooncake(path: Path) -> Workload:
    """A Mooncake trace: chains of blocks of 512 tokens, the last one partial; equal hashes are equal prefixes."""
    forest, requests = Forest(), []
    for line in read_lines(path, "hash_ids", "input_length"):
        nodes = [-1]
        for i, block in enumerate(line["hash_ids"]):
            size = min(BLOCK_TOKENS, line["input_length"] - i * BLOCK_TOKENS)
            nodes.append(forest.child(nodes[-1], (block, size), size, document=True))
        requests.append(Request(tuple(nodes[1:]), documents=len(nodes) - 1))
    return forest.workload(path.stem.removesuffix("_trace"), requests)
