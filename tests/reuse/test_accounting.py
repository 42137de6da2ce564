"""What the cache and its policy hear of a request: one look-up, and the request's own totals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.baseline.policy.lfu import LFU
from benchmarks.policies.cell import modelled
from benchmarks.policies.simulator import Simulator
from benchmarks.policies.source import Forest, Request
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy.base import Access
from ragjax.cache.policy.gdsf import PGDSF
from ragjax.cache.pool import PagePool
from ragjax.core import NEVER, Kind, Prompt, Segment, Tokens, intervals
from ragjax.core.prompt import Keep
from ragjax.reuse import strategies
from ragjax.reuse.base import Strategy
from ragjax.reuse.craft import Craft
from ragjax.reuse.exact import Prefix
from tests.support.executor import Executor

SYSTEM, QUESTION = 6, 5
ANSWER = np.arange(8, dtype=np.int32)
LENGTHS = (9, 14, 11, 7)


class Listener(LFU):
    """Writes down what requests computed: (cached, new) of each node that is admitted, without repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, int]] = []

    def on_access(self, node: Any, access: Access) -> None:
        super().on_access(node, access)
        if not access.hit and (access.cached, access.new) not in self.heard[-1:]:
            self.heard.append((access.cached, access.new))


def listening() -> tuple[Executor, Listener]:
    executor, listener = Executor(), Listener()
    executor.cache = KnowledgeCache(b"heard", PagePool(200, executor.page_size), listener)
    return executor, listener


def finish(executor: Executor, strategy: Strategy, asked: Prompt, answer: Tokens) -> None:
    """A request with an answer, whose KV is whatever lies in its slots."""
    talk = executor.talk(strategy, asked)
    strategy.finish(asked, talk.end(), answer, talk.allocation)
    talk.close()


def prompt(chunks: tuple[int, ...], question: int) -> Prompt:
    random = np.random.default_rng(question)
    system = Segment("system", Kind.SYSTEM, np.arange(30, 30 + SYSTEM, dtype=np.int32), public=True)
    made = [
        Segment(f"c{i}", Kind.CHUNK, (40 * i + np.arange(LENGTHS[i])).astype(np.int32) % 250, public=True)
        for i in chunks
    ]
    asked = Segment("q", Kind.QUERY, random.integers(0, 256, QUESTION).astype(np.int32))
    return Prompt((system, *made, asked))


ASKED = ((0, 1), (1, 2), (0, 3, 1), (2,), (0, 1, 2, 3))


@pytest.mark.parametrize("name", ["prefix", "naive", "craft"])
def test_policies_hear_the_totals_that_the_simulator_tells_them(name: str) -> None:
    """RAGCache, Algorithm 1: alpha and beta are the request's, whatever pieces it is admitted in."""
    strategy = Craft(alpha=0.0) if name == "craft" else strategies()[name]  # nothing is mended
    executor, listener = listening()
    simulated, forest = Listener(), Forest()
    top = forest.child(-1, "system", SYSTEM)
    made, told = [], []
    for number, chunks in enumerate(ASKED):
        nodes = [top]
        for i in chunks:  # a chunk hangs below those before it, or below the system prompt
            nodes.append(forest.child(nodes[-1] if name == "prefix" else top, i, LENGTHS[i]))
        made.append(Request(tuple(nodes), other=QUESTION))
        done = executor.run(strategy, prompt(chunks, number))
        told.append(sum(part.recomputed for part in done.plan.reports))
    Simulator(forest.workload("asked", made), simulated, 10_000).run()
    if name == "prefix":  # the question is kept too, and so the request is heard of even where no chunk is new
        simulated.heard = [(forest_total(r, forest) - n, n) for r, n in zip(made, told, strict=True)]
    assert listener.heard == simulated.heard and len(listener.heard) >= 3
    assert all(new in told for _, new in listener.heard)


def forest_total(request: Request, forest: Forest) -> int:
    return sum(forest.sizes[n] for n in request.nodes) + request.other


@pytest.mark.parametrize("name", list(strategies()))
def test_the_account_names_the_tokens_that_lie_in_slots_of_the_requests_own(name: str) -> None:
    strategy, executor = strategies()[name], Executor()
    for chunks in ((0, 1, 2), (0, 2, 1), (0, 2, 1)):
        asked = prompt(chunks, 0)
        talk = executor.talk(strategy, asked, 0.3 if strategy.selective else None)
        talk.end()
        own, computed = talk.allocation.own_pages, set()
        for span in talk.plan.spans:
            pages = span.run.slots(executor.page_size) // executor.page_size
            computed |= {int(i) for i, page in zip(span.indices, pages, strict=True) if int(page) in own and i != NEVER}
        told = [
            start + place
            for start, part in zip(asked.starts, talk.plan.reports, strict=False)
            for begin, end in part.recomputed_at
            for place in range(begin, end)
        ]
        assert told == sorted(computed) and len(told) == sum(part.recomputed for part in talk.plan.reports)
        talk.close()
    if strategy.selective:
        assert any(0 < part.recomputed < part.tokens for part in talk.plan.reports), "a chunk was repaired in part"


def test_places_become_intervals() -> None:
    for places, found in (([], ()), ([3], ((3, 4),)), ([0, 1, 2, 5, 7, 8], ((0, 3), (5, 6), (7, 9)))):
        assert intervals(np.array(places, np.int32)) == found


@pytest.mark.parametrize("name", ["prefix", "naive", "craft", "dependency"])
def test_a_cold_request_hits_nothing_and_counts_once(name: str) -> None:
    executor, _ = listening()
    finish(executor, strategies()[name], prompt((0, 1), 0), ANSWER)
    metrics = executor.cache.metrics
    assert (metrics.exact_hit_tokens, metrics.approximate_hit_tokens, dict(metrics.tier_hit_tokens)) == (0, 0, {})
    assert {node.note >> 40 for node in executor.cache.tree.nodes()} == {1}
    assert {node.hits for node in executor.cache.tree.nodes()} == {0}


def test_a_warm_request_counts_once_and_finds_the_finished_turn() -> None:
    executor, _ = listening()
    asked = prompt((0, 1), 0)
    for count in (1, 2):
        finish(executor, Prefix(), asked, ANSWER)
        assert max(node.note >> 40 for node in executor.cache.tree.nodes()) == count
    match = executor.cache.matcher.match_prefix(np.concatenate([asked.tokens, ANSWER]))
    assert match.complete
    match.release()


def test_an_answer_costs_a_token_what_its_prompt_did() -> None:
    """RAGCache, formula 3: not a whole step for each of a few tokens."""
    executor, _ = listening()
    executor.cache = KnowledgeCache(b"dear", PagePool(200, executor.page_size), PGDSF(modelled()))
    asked = prompt((0, 1), 0)
    finish(executor, Prefix(), asked, ANSWER)
    rates = {node.end: node.note.rate for node in executor.cache.tree.nodes()}
    assert max(rates) == len(asked) + 8 and len(set(rates.values())) == 1


@pytest.mark.parametrize(("keep", "end"), [("all", -1), ("documents", 4)])
def test_prefix_keeps_what_it_is_told_to(keep: Keep, end: int) -> None:
    executor, listener = listening()
    executor.cache.keep = keep
    asked, cold = prompt((0, 1, 2), 0), prompt((3,), 1)
    assert Prefix().work(asked, executor.cache, "") == len(asked)
    first = executor.run(Prefix(), asked)
    kept = asked.starts[end] if end > 0 else len(asked)
    assert asked.kept(keep) == kept == max(node.end for node in executor.cache.tree.nodes())
    assert listener.heard == [(0, len(asked))], "the request's totals, whatever is kept"
    again = executor.run(Prefix(), asked)
    assert sum(part.reused for part in again.plan.reports) == min(kept, len(asked) - 1)
    assert again.plan.exact_to == "full"
    np.testing.assert_allclose(again.plan.logits, first.plan.logits, atol=1e-9)
    assert Prefix().work(asked, executor.cache, "") == len(asked) - kept
    finish(executor, Prefix(), cold, ANSWER[:4])
    behind = executor.cache.matcher.match_prefix(np.concatenate([cold.tokens, ANSWER[:4]]))
    assert behind.length == (len(cold) + 4 if keep == "all" else cold.kept(keep)), "an answer is no document"
    behind.release()


def test_a_prompt_without_documents_is_kept_whole() -> None:
    assert Prompt(prompt((), 0).segments).kept("documents") == SYSTEM + QUESTION
