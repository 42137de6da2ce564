"""Requests whose messages bring passages: reuse at any place, exactness, replay; when chunks are retrieved besides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ragjax.core import ConfigError, Divergence, Document, EngineOptions, Message
from ragjax.engine import Engine
from ragjax.quality.contract import Contract
from ragjax.quality.report import Budget, Measurement, Report, Setting
from tests.support import tiny
from tests.support.pace import until
from tests.support.stuffed import DOCUMENTS, PROMPTS

ORDERS = ((0, 1, 2), (2, 0, 1), (1, 2, 0))


def stuffed(order: tuple[int, ...], shape: str = "stuff", system: str = "") -> tuple[Message, ...]:
    opening = (Message("system", system),) if system else ()
    return (*opening, Message("user", PROMPTS[shape]([DOCUMENTS[i] for i in order])))


pytestmark = pytest.mark.engine(recognise=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["naive", "anchor", "craft", "blend"])
def test_passages_are_warm_at_any_place_in_any_order(engine: Engine, strategy: str) -> None:
    engine.answer(stuffed(ORDERS[0], system="Be kind, and say what you know."), strategy=strategy, max_tokens=1)
    for order, shape in zip(ORDERS, ("stuff", "numbered", "tags"), strict=True):
        answer = engine.answer(stuffed(order, shape, "Be brief."), strategy=strategy, max_tokens=1)
        passages = [r for r in answer.segments if r.id.startswith("passage-")]
        assert [r.tokens for r in passages] == [len(DOCUMENTS[i]) for i in order]
        assert strategy == "craft" or all(r.reused > 0 for r in passages)  # craft computes all of what differs most
        assert any(r.reused > 0 for r in passages)
        if strategy == "naive":
            assert all(r.reused == r.tokens for r in passages)
        assert answer.exact_to is None and answer.predicted is None


def test_naive_is_the_same_cold_and_warm(engine: Engine) -> None:
    messages = stuffed(ORDERS[0], system="Be brief.")
    cold = engine.answer(messages, strategy="naive", max_tokens=6, want_logits=True)
    warm = engine.answer(messages, strategy="naive", max_tokens=6, want_logits=True)
    engine.clear_cache()
    engine.answer(stuffed(ORDERS[1], system="Be kind."), strategy="naive", max_tokens=1)
    mixed = engine.answer(messages, strategy="naive", max_tokens=6, want_logits=True)
    for other in (warm, mixed):
        assert other.tokens == cold.tokens
        np.testing.assert_allclose(other.logits, cold.logits, atol=2e-4)
    assert warm.cached_tokens > cold.cached_tokens == 0


@pytest.mark.parametrize("strategy", ["prefix", "full", "moved"])
def test_strategies_that_cut_nothing_read_the_whole(engine: Engine, strategy: str) -> None:
    messages = stuffed(ORDERS[0], system="Be brief.")
    plain = engine.answer(messages, strategy="full", recognise=False, max_tokens=6, want_logits=True)
    for _ in range(2):
        answer = engine.answer(messages, strategy=strategy, max_tokens=6, want_logits=True)
        assert (answer.exact_to, answer.prompt_tokens, answer.tokens) == ("full", plain.prompt_tokens, plain.tokens)
        np.testing.assert_allclose(answer.logits, plain.logits, atol=2e-4)
    assert [r.id for r in answer.segments] == ["question"]
    assert answer.cached_tokens == (0 if strategy == "full" else plain.prompt_tokens - 1)


def test_what_naive_recognised_never_serves_prefix(engine: Engine) -> None:
    messages = stuffed(ORDERS[0], system="Be brief.")
    first = engine.answer(messages, strategy="naive", max_tokens=6)
    head = sum(r.tokens for r in first.segments[: next(i for i, r in enumerate(first.segments) if "passage" in r.id)])
    exact = engine.answer(messages, strategy="prefix", max_tokens=6, want_logits=True)
    full = engine.answer(messages, strategy="full", max_tokens=6, want_logits=True)
    assert exact.cached_tokens == head and exact.tokens == full.tokens
    np.testing.assert_allclose(exact.logits, full.logits, atol=2e-4)


def test_a_request_says_whether_passages_are_recognised(engine: Engine) -> None:
    one = engine.answer(stuffed(ORDERS[0]), strategy="naive", recognise=False, max_tokens=1)
    assert [r.id for r in one.segments] == ["question"] and one.exact_to == "full"
    again = engine.answer(stuffed(ORDERS[0]), strategy="naive", recognise=False, max_tokens=1)
    assert again.cached_tokens == again.prompt_tokens - 1, "an identical message is an exact prefix to any strategy"


def test_a_tenant_reads_its_own_passages_alone(engine: Engine) -> None:
    engine.answer(stuffed(ORDERS[0]), strategy="naive", tenant="ann", max_tokens=1)
    assert engine.answer(stuffed(ORDERS[1]), strategy="naive", tenant="bob", max_tokens=1).cached_tokens == 0
    assert engine.answer(stuffed(ORDERS[1]), strategy="naive", tenant="ann", max_tokens=1).cached_tokens > 500


def test_shadow_replay_compares_with_full_attention_over_the_same_tokens() -> None:
    seen: list[tuple[Setting, bool, float]] = []
    contract = Contract(Setting("naive"), "float32", shadow_rate=1.0)
    observe = contract.observe

    def note(setting: Setting, exact: bool, divergence: Divergence, covered: bool) -> None:
        observe(setting, exact, divergence, covered)
        seen.append((setting, exact, divergence.kl))

    contract.observe = note  # type: ignore[method-assign]
    with tiny.engine(recognise=True, strategy="naive", contract=contract) as made:
        asked: tuple[dict[str, Any], ...] = ({"strategy": "naive"}, {"recognise": False}, {"strategy": "prefix"})
        for count, options in enumerate(asked, 1):  # the first request has left a head, which the others reuse
            made.answer(stuffed(ORDERS[0]), max_tokens=8, **options)
            until(lambda: len(seen) == count)  # noqa: B023
    assert [(setting, exact) for setting, exact, _ in seen] == [
        (Setting("naive", None, "recognised"), False),
        (Setting("naive"), True),
        (Setting("prefix"), True),
    ]
    assert seen[0][2] > 1e-3 > 1e-6 > max(kl for *_, kl in seen[1:])
    assert contract.stats()["shadow_faults_total"] == 0


def test_auto_moves_what_conversations_bring_again_if_that_saves_something() -> None:
    moved = Measurement(Setting("moved"), 10, 0.01, 0.02, 0.9, 0.8, 3.0, 0.0)
    report = Report("ab12", "tiny", "float32", "2026-01-01T00:00:00+00:00", "cd", 3, (), moved)
    contract = Contract(Setting("auto"), "float32", report=report, budget=Budget(0.5))
    with tiny.engine(contract=contract) as made:
        first = made.answer(stuffed(ORDERS[0], system="Be brief."), max_tokens=4)
        assert (first.strategy, first.exact_to, first.cached_tokens) == ("prefix", "full", 0)
        again = made.answer(stuffed(ORDERS[1], system="It is noon. Be brief."), max_tokens=4)
        assert (again.strategy, again.exact_to, again.notices) == ("moved", None, ())
        assert again.predicted == Divergence(0.01, 0.9)
        assert again.cached_tokens > 0.8 * again.prompt_tokens and again.figures["moved"] > 0
        short = made.answer("Who keeps it?", max_tokens=4)
        assert (short.strategy, short.exact_to) == ("prefix", "full")


def test_auto_is_exact_with_recognised_passages() -> None:
    rows = (Measurement(Setting("naive"), 10, 0.01, 0.02, 0.9, 0.8, 3.0, 0.0),)
    rows += (Measurement(Setting("prefix"), 10, 0.0, 0.0, 1.0, 1.0, 9.0, 0.0),)
    report = Report("ab12", "tiny", "float32", "2026-01-01T00:00:00+00:00", "cd", 3, rows)
    contract = Contract(Setting("auto"), "float32", report=report, budget=Budget(0.5))
    with tiny.engine(contract=contract) as made:
        found = made.answer(stuffed(ORDERS[0]), recognise=True, max_tokens=1)
        assert (found.strategy, found.exact_to, found.notices) == ("prefix", "full", ())
        assert made.answer(stuffed(ORDERS[0]), recognise=True, strategy="naive", max_tokens=1).predicted is None


@pytest.mark.parametrize("strategy", ["naive", "anchor"])
def test_a_document_that_is_pasted_again_is_a_prefix_and_one_that_moves_is_reused(strategy: str) -> None:
    with tiny.engine(recognise=True, strategy=strategy) as made:
        first = made.answer(stuffed(ORDERS[0]), max_tokens=1)
        again = made.answer(stuffed(ORDERS[0]), max_tokens=1)
        moved = [made.answer(stuffed(order), max_tokens=1) for order in (ORDERS[1], ORDERS[2])]
        named = made.answer(stuffed(ORDERS[0]), max_tokens=1, strategy=strategy)
        made.audit()
    for answer in (first, again):
        assert (answer.strategy, answer.exact_to) == ("prefix", "full")
        (notice,) = answer.notices
        assert notice.startswith(f"{strategy} would have computed") and "ran prefix, which is exact" in notice
    assert (first.cached_tokens, again.cached_tokens) == (0, again.prompt_tokens - 1)
    for answer in moved:
        assert answer.strategy == strategy and not any("ran prefix" in notice for notice in answer.notices)
    assert moved[1].cached_tokens > 500, "the passages were computed for reuse when they came at another place"
    assert named.strategy == strategy, "as it was asked for"


# --------------------------------------------------------------------------------- retrieval besides


@pytest.mark.parametrize(
    ("retrieve", "plain", "brought", "asked"),
    [("auto", True, False, True), ("always", True, True, True), ("asked", False, False, True)],
)
def test_when_passages_are_retrieved(retrieve: str, plain: bool, brought: bool, asked: bool) -> None:
    with tiny.engine(retrieve=retrieve, top_k=1) as made:
        made.add_documents([Document("ferry", "The ferry to Orlan leaves at nine.", "Ferry")])

        def ids(messages: str | tuple[Message, ...], **options: int | str) -> list[str]:
            answer = made.answer(messages, max_tokens=1, **options)  # type: ignore[arg-type]
            assert any("bring passages" in notice for notice in answer.notices) == (
                retrieve == "auto" and messages != "When does the ferry leave?" and not options
            )
            return [r.id for r in answer.segments]

        assert ("ferry#0" in ids("When does the ferry leave?")) == plain
        assert ("ferry#0" in ids(stuffed((0, 1)))) == brought
        assert ("ferry#0" in ids(stuffed((0, 1)), top_k=1)) == asked
        assert ("ferry#0" in ids(stuffed((0, 1)), knowledge="default")) == asked
    with pytest.raises(ConfigError, match="retrieve must be"):
        EngineOptions("tiny", retrieve="never")
