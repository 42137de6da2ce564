"""The alternative path of FusionRAG on the one tree (section 4.1): what `prefix` left is found by `fusion`."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.core import Kind, Prompt
from ragjax.reuse import strategies
from tests.support import tiny
from tests.support.audit import audit_cache
from tests.support.executor import Executor

SYSTEM, A, B, QUESTION = tiny.prompt(3, chunks=(30, 25)).segments


def test_leading_chunks_that_prefix_left_are_exact_and_not_computed() -> None:
    executor, fusion, full = Executor(), strategies()["fusion"], strategies()["full"]
    prompt = Prompt((SYSTEM, A, B, QUESTION))
    executor.run(strategies()["prefix"], prompt)
    plan = executor.run(fusion, prompt).plan
    assert plan.exact_to == "full" and [part.recomputed for part in plan.reports[:3]] == [0, 0, 0]
    np.testing.assert_allclose(plan.logits, executor.run(full, prompt).plan.logits, atol=1e-9)
    audit_cache(executor.cache)


def test_the_exact_part_is_not_mended_and_the_rest_is() -> None:
    executor = Executor()
    executor.run(strategies()["prefix"], Prompt((SYSTEM, A, QUESTION)))
    plan = executor.run(strategies()["fusion"], Prompt((SYSTEM, A, B, QUESTION)), 1.0).plan
    assert [part.recomputed for part in plan.reports[:3]] == [0, 0, len(B)]
    full = executor.run(strategies()["full"], Prompt((SYSTEM, A, B, QUESTION))).plan
    assert plan.exact_to == "full"
    np.testing.assert_allclose(plan.logits, full.logits, atol=1e-9)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_chunks_that_change_their_order_are_found(ratio: float) -> None:
    executor, fusion = Executor(), strategies()["fusion"]
    executor.run(strategies()["prefix"], Prompt((SYSTEM, A, B, QUESTION)))
    before = executor.cache.metrics
    nodes = len(executor.cache.tree)
    plan = executor.run(fusion, Prompt((SYSTEM, B, A, QUESTION)), ratio).plan
    after = executor.cache.metrics
    assert plan.exact_to is None
    found = after.approximate_hit_tokens - before.approximate_hit_tokens
    assert found == len(A) + len(B), "each is moved from where prefix computed it"
    assert sum(part.recomputed for part in plan.reports[:3]) == int(np.ceil(ratio * (len(A) + len(B))))
    assert len(executor.cache.tree) == nodes, "nothing is kept twice"
    audit_cache(executor.cache)


def test_the_anchor_is_as_it_was() -> None:
    """The default strategy answers alike whatever ran before."""
    executor, anchor = Executor(), strategies()["anchor"]
    executor.run(strategies()["prefix"], Prompt((SYSTEM, B, A, QUESTION)))
    plan = executor.run(anchor, Prompt((SYSTEM, A, B, QUESTION))).plan
    alone = Executor().run(anchor, Prompt((SYSTEM, A, B, QUESTION))).plan
    assert anchor.steady and not strategies()["fusion"].steady
    np.testing.assert_allclose(plan.logits, alone.logits, atol=1e-9)
    assert SYSTEM.kind is Kind.SYSTEM
