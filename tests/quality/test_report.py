"""The quality contract: report, budget, monitor; planted faults are found by the gate and by shadow replay."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy.base import LRU
from ragjax.cache.pool import PagePool
from ragjax.commands import gate
from ragjax.commands.flags import knowledge
from ragjax.core import (
    Answer,
    ConfigError,
    Divergence,
    Document,
    EngineOptions,
    Graph,
    Kind,
    Plan,
    Prefill,
    Prompt,
    RequestError,
    Span,
    Tokens,
)
from ragjax.engine import Engine, prepare
from ragjax.engine import build as loading
from ragjax.engine.measurement import report_of, report_path
from ragjax.engine.preprocessing import preprocess
from ragjax.models.hub import cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import model_digest
from ragjax.models.weights import open_checkpoint
from ragjax.quality.contract import AUTO, FAR, FULL, LEAST, QUEUE, STEPS, WATCH, WINDOW, Contract, Monitor, Verdict
from ragjax.quality.evidence import MOST, NEEDED, LiveEvidence, ShadowTrial
from ragjax.quality.report import MOVED, PREFIX, Budget, Measurement, Report, Setting, bounds, divergence
from ragjax.reuse import strategies
from ragjax.reuse.base import Allocation
from ragjax.reuse.craft import Craft
from ragjax.reuse.exact import Full, Prefix
from ragjax.reuse.moved import Moved
from ragjax.reuse.naive import Naive
from tests.support import tiny
from tests.support.pace import until


@pytest.fixture(autouse=True)
def every_mark_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are marked as preprocessed need no KV of fusion here."""
    monkeypatch.setattr(prepare, "without_lost", lambda prompt, cache, tenant: prompt)


NAIVE = Setting("naive")
PREPROCESSED = frozenset(name for name, strategy in strategies().items() if strategy.preprocessed)
SYSTEM = 20
SOUND, FAULTY = 0.0073, 0.0132
"""KL of naive on the miniature's prompts, as it should be and with keys turned by 7 positions too much."""


def measurement(setting: Setting, kl: float, ttft_ms: float, top1: float = 0.9, margin: float = 0.01) -> Measurement:
    return Measurement(setting, 10, kl, kl + margin, top1, top1 - margin, ttft_ms, setting.ratio or 0.0)


def report(*measurements: Measurement, **fields: Any) -> Report:
    return Report("ab12", "tiny", "float32", "2026-01-01T00:00:00+00:00", "cd", 3, measurements, **fields)


BLEND = tuple(Setting("blend", ratio) for ratio in (0.0, 0.15, 0.3))
REPORT = report(
    measurement(PREFIX, 0.0, 100.0, 1.0, 0.0),
    measurement(BLEND[0], 0.4, 20.0, 0.5),
    measurement(BLEND[1], 0.09, 40.0, 0.8),
    measurement(BLEND[2], 0.05, 60.0, 0.9),
    measurement(Setting("random", 0.3), 0.3, 55.0, 0.6),
    measurement(Setting("craft"), 0.03, 80.0, 0.95),
)


# ---------------------------------------------------------------------------------------- divergence


def test_divergence_is_that_of_the_definition() -> None:
    random = np.random.default_rng(0)
    full, other = (random.normal(0, 4, (5, 30)).astype(np.float32) for _ in range(2))
    other[1] = full[1] + 3  # the same distribution
    expected, same = 0.0, 0
    for a, b in zip(full, other, strict=True):
        p = [math.exp(x) / sum(math.exp(y) for y in a) for x in a]
        q = [math.exp(x) / sum(math.exp(y) for y in b) for x in b]
        expected += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / 5
        same += int(max(range(30), key=lambda i: p[i]) == max(range(30), key=lambda i: q[i]))
    found = divergence(full, other)
    assert found.kl == pytest.approx(expected, rel=1e-5) and found.top1 == same / 5
    assert divergence(full, full) == Divergence(0.0, 1.0)


def test_logits_that_are_no_numbers_are_far_away() -> None:
    full = np.zeros((2, 4), np.float32)
    assert divergence(full, np.full((2, 4), np.nan, np.float32)) == Divergence(math.inf, 0.0)
    for other in (np.zeros((3, 4), np.float32), np.zeros((2, 5), np.float32)):
        with pytest.raises(ValueError, match="cannot be compared"):
            divergence(full, other)
    with pytest.raises(ValueError, match="cannot be compared"):
        divergence(full[:0], full[:0])


def test_bounds_hold_the_mean_19_times_of_20() -> None:
    random = np.random.default_rng(1)
    for draw in (lambda: random.exponential(1.0, 60), lambda: random.normal(1.0, 0.5, 60)):
        found = [bounds(list(draw())) for _ in range(2000)]
        assert 0.03 < np.mean([low > 1.0 for low, _ in found]) < 0.07
        assert 0.03 < np.mean([high < 1.0 for _, high in found]) < 0.08
    assert bounds([3.0]) == (-math.inf, math.inf) and bounds([2.0, 2.0]) == (2.0, 2.0)
    assert bounds([1.0, math.inf])[1] == math.inf


# -------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [("KL=0.05", Budget(0.05)), ("top1 = 0.95", Budget(None, 0.95)), ("KL=0, TOP1=1", Budget(0.0, 1.0))],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget and Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "0.05", "KL", "KL=", "KL=-1", "KL=nan", "KL=inf", "F1=0.9", "TOP1=2", "KL=1,KL=2", "KL=1,"]
)
def test_bad_budgets_say_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=r'write "KL=0\.05"'):
        Budget.parse(text)


def test_the_cheapest_setting_inside_by_its_bounds() -> None:
    cheapest = REPORT.cheapest
    assert cheapest(Budget(0.5)) == BLEND[0]
    assert cheapest(Budget(0.1)) == BLEND[1]
    assert cheapest(Budget(0.0999)) == BLEND[2], "the bound decides, not the mean"
    assert cheapest(Budget(None, 0.79)) == BLEND[1] and cheapest(Budget(0.5, 0.85)) == BLEND[2]
    assert cheapest(Budget(0.001)) == PREFIX
    assert replace(REPORT, measurements=REPORT.measurements[1:]).cheapest(Budget(0.001)) is None


def test_the_ladder_rises_in_cost_and_falls_in_divergence() -> None:
    assert REPORT.ladder(Budget(0.5)) == (*BLEND, Setting("craft"), PREFIX)
    assert REPORT.ladder(Budget(0.1)) == (*BLEND[1:], Setting("craft"), PREFIX)
    assert REPORT.ladder(Budget(0.001)) == (PREFIX,)


def test_predictions_are_of_the_nearest_ratio_not_above() -> None:
    assert REPORT.predicted(Setting("blend", 0.2)) == Divergence(0.09, 0.8)
    assert REPORT.predicted(Setting("blend", 1.0)) == Divergence(0.05, 0.9)
    assert REPORT.predicted(Setting("craft")) == Divergence(0.03, 0.95)
    unknown = (Setting("blend"), Setting("craft", 0.3), Setting("random", 0.1), Setting("fusion", 0.3))
    compressed = Setting("blend", 0.2, "snapkv:64")
    assert [REPORT.predicted(setting) for setting in (*unknown, compressed)] == [None] * 5


# -------------------------------------------------------------------------------------------- report


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ab12.json"
    REPORT.save(path)
    assert Report.load(path, "ab12") == REPORT
    assert [file.name for file in path.parent.iterdir()] == ["ab12.json"]


def ratio_of(row: dict[str, Any], ratio: Any) -> dict[str, Any]:
    return {**row, "setting": {**row["setting"], "ratio": ratio}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: {**data, "version": 0}, "not version 2"),
        (lambda data: {**data, "identity": "ff"}, "of another model, tiny in float32"),
        (lambda data: {**data, "surplus": 1}, "no quality report"),
        (lambda data: {k: v for k, v in data.items() if k != "top_k"}, "no quality report"),
        (lambda data: {**data, "top_k": "3"}, "no quality report"),
        (lambda data: {**data, "measurements": [ratio_of(data["measurements"][1], "0.1")]}, "no quality report"),
        (lambda data: {**data, "measurements": [ratio_of(data["measurements"][1], 1.5)]}, "no quality report"),
        (lambda data: [data], "no quality report"),
        (lambda data: {**data, "measurements": [{**data["measurements"][0], "kl": math.nan}]}, "no finite figures"),
        (lambda data: {**data, "measurements": [{**data["measurements"][0], "n": 1}]}, "two questions"),
    ],
)
def test_a_report_that_cannot_be_used(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    REPORT.save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigError, match=message) as caught:
        Report.load(path, "ab12")
    assert "ragjax gate" in str(caught.value)


def test_a_report_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no quality report"):
        Report.load(tmp_path / "report.json", "ab12")


# ------------------------------------------------------------------------------------------- monitor


def watch(monitor: Monitor, kl: float, times: int, top1: float = 1.0, wobble: float = 0.0) -> list[Verdict]:
    return [monitor.add(monitor.setting, Divergence(kl + wobble * (-1) ** i, top1)) for i in range(times)]


def test_inside_the_budget_nothing_happens() -> None:
    monitor = Monitor(Budget(0.1, 0.9), REPORT.ladder(Budget(0.1)))
    assert set(watch(monitor, 0.08, 300, 0.95, 0.02)) == {"keep"}
    assert monitor.setting == BLEND[1]


def test_outside_the_next_rung_begins_with_a_new_window() -> None:
    monitor = Monitor(Budget(0.1), REPORT.ladder(Budget(0.1)))
    assert watch(monitor, 0.12, LEAST) == ["keep"] * (LEAST - 1) + ["raise"]
    assert monitor.setting == BLEND[2]
    assert watch(monitor, 0.12, LEAST) == ["keep"] * (LEAST - 1) + ["raise"]
    assert monitor.setting == Setting("craft")
    assert watch(monitor, 0.12, LEAST)[-1] == "exact"
    assert monitor.setting == PREFIX
    assert set(watch(monitor, 9.0, 100)) == {"keep"}, "nothing is above the last rung"


def test_the_bound_decides_and_not_the_mean() -> None:
    monitor = Monitor(Budget(0.1), REPORT.ladder(Budget(0.1)))
    assert "raise" in watch(monitor, 0.09, 2 * LEAST, wobble=0.085)


def test_far_outside_is_no_matter_of_ratios() -> None:
    for kl in (0.1 * FAR * 1.5, math.inf):
        monitor = Monitor(Budget(0.1), REPORT.ladder(Budget(0.1)))
        assert watch(monitor, kl, LEAST)[-1] == "exact"
        assert monitor.setting == PREFIX


def test_agreement_has_a_budget_too() -> None:
    monitor = Monitor(Budget(None, 0.7), REPORT.ladder(Budget(None, 0.7)))
    first = monitor.setting
    assert set(watch(monitor, 5.0, 50, 0.75)) == {"keep"}
    doubtful = Monitor(Budget(None, 0.7), REPORT.ladder(Budget(None, 0.7)))
    seen = [doubtful.add(first, Divergence(0.0, 0.75 + 0.2 * (-1) ** i)) for i in range(LEAST)]
    assert seen[-1] == "raise", "the lower bound decides"
    assert "raise" in watch(monitor, 0.0, WINDOW, 0.6) and monitor.setting != first


def test_what_is_long_past_is_forgotten_and_other_settings_tell_nothing() -> None:
    monitor = Monitor(Budget(0.1), REPORT.ladder(Budget(0.1)))
    watch(monitor, 0.0, 1000)
    assert "raise" in watch(monitor, 0.15, WINDOW)
    monitor = Monitor(Budget(0.1), REPORT.ladder(Budget(0.1)))
    assert {monitor.add(NAIVE, Divergence(9.0, 0.0)) for _ in range(50)} == {"keep"}


# ------------------------------------------------------------------------------------------ contract


def automatic(measured: Report | None = REPORT, budget: Budget = Budget(0.1), **options: Any) -> Contract:  # noqa: B008
    return Contract(Setting(AUTO), "float32", report=measured, budget=budget, preprocessed=PREPROCESSED, **options)


def marked(prompt: Prompt) -> Prompt:
    """The prompt with chunks that count as preprocessed."""
    return Prompt(tuple(replace(s, behind=b"x" * 32) if s.kind is Kind.CHUNK else s for s in prompt.segments))


def test_a_budget_picks_what_requests_get() -> None:
    contract = automatic()
    assert contract.setting == Setting(AUTO) and contract.pick == BLEND[1] and contract.notices == ()
    assert (
        contract.summary
        == "auto: blend at 0.15 for preprocessed passages, within KL=0.1 of full attention; else prefix"
    )
    assert contract.strategies == {"blend", "prefix"}, "these are compiled ahead"
    assert contract.predicted(BLEND[1], False, 3) == Divergence(0.09, 0.8)
    assert contract.predicted(BLEND[1], True, 9) == Divergence(0.0, 1.0)
    assert contract.predicted(BLEND[1], False, 4) is None, "no question had so many chunks"
    assert automatic(None).predicted(NAIVE, False, 1) is None
    assert Contract(NAIVE, "float32").summary == "naive" and Contract(NAIVE, "float32").strategies == {"naive"}
    with pytest.raises(ConfigError):
        automatic(shadow_rate=1.5)


@pytest.mark.parametrize("measured", [None, replace(REPORT, measurements=REPORT.measurements[1:])])
def test_without_a_setting_inside_the_budget_auto_is_exact(measured: Report | None) -> None:
    contract = automatic(measured, Budget(0.01))
    assert contract.pick == PREFIX and contract.summary == "auto: prefix" and contract.strategies == {"prefix"}


FUSION, ANCHOR = Setting("fusion"), Setting("anchor", 0.15)
FUSED = replace(
    REPORT, measurements=(*REPORT.measurements, measurement(FUSION, 0.06, 30.0), measurement(ANCHOR, 0.02, 35.0))
)


def test_auto_has_evidence_of_preprocessed_chunks_alone() -> None:
    contract, bare = automatic(FUSED), tiny.prompt(chunks=(20,) * 3)
    assert contract.pick == FUSION
    assert contract.uncovered(marked(bare)) is None
    for other in (bare, tiny.prompt(chunks=())):
        assert contract.uncovered(other) == ""
    many = contract.uncovered(marked(tiny.prompt(chunks=(20,) * 4)))
    assert "up to 3 chunks, and here are 4" in many
    assert contract.predicted(FUSION, False, 3) == Divergence(0.06, 0.9)
    assert contract.predicted(FUSION, False, 3, preprocessed=False) is None, "it was not measured with such chunks"


def test_conversations_are_moved_if_the_report_has_them_inside_the_budget_and_replay_agrees() -> None:
    talk, chunks = tiny.prompt(chunks=()), tiny.prompt(chunks=(20,) * 3)
    assert automatic(FUSED).without_evidence(talk) == PREFIX
    assert automatic(replace(FUSED, conversations=measurement(MOVED, 0.2, 5.0))).without_evidence(talk) == PREFIX
    contract = automatic(replace(FUSED, conversations=measurement(MOVED, 0.02, 5.0)))
    assert contract.without_evidence(talk) == MOVED and contract.without_evidence(chunks) == PREFIX
    assert contract.predicted(MOVED, False, 0) == Divergence(0.02, 0.9) and "moved" in contract.strategies
    assert ", moved for prompts without passages, within KL=" in contract.summary
    assert contract.pick == FUSION, "conversations tell nothing of retrieved passages"
    for _ in range(LEAST):
        contract.observe(MOVED, False, Divergence(0.2, 0.5))
    assert contract.without_evidence(talk) == PREFIX and contract.pick == FUSION
    assert "found moved outside" in contract.notices[0]


def test_what_replay_sees_of_requests_that_the_report_does_not_cover_moves_nothing() -> None:
    contract = automatic(FUSED)
    for _ in range(2 * LEAST):
        contract.observe(FUSION, False, Divergence(0.5, 0.5), False)
        contract.observe(BLEND[1], False, Divergence(0.5, 0.5))
    assert contract.pick == FUSION
    for _ in range(LEAST):
        contract.observe(FUSION, False, Divergence(0.2, 0.5))
    assert contract.pick == ANCHOR
    contract.observe(PREFIX, True, Divergence(0.01, 1.0), False)
    assert contract.setting == contract.pick == FULL, "an exact answer that is not ends all reuse"


def test_strategies_that_take_preprocessed_chunks_are_named() -> None:
    """Their keys depend on what a chunk was computed behind."""
    cache = KnowledgeCache(b"tiny", PagePool(8, tiny.PAGE), LRU())
    bare = tiny.prompt()
    known, other = strategies(), marked(bare)
    found = {name for name, one in known.items() if one.keys(bare, cache, "") != one.keys(other, cache, "")}
    assert found == PREPROCESSED


def test_a_request_gets_what_holds_for_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine(contract=automatic(replace(FUSED, top_k=5))) as engine:
        engine.add_documents([Document(f"d{n}", f"Island number {n} trades in copper and silk.") for n in range(4)])
        before = engine.answer("Who trades in silk?", max_tokens=1)
        preprocess(engine, n=2, progress=False)
        after = engine.answer("Who trades in copper?", max_tokens=1)
        given = engine.answer("Who trades in silk?", documents=[Document("x", "Rhodes trades in silk.")], max_tokens=1)
        named = engine.answer("Who?", documents=[Document("x", "Rhodes trades.")], strategy="fusion", max_tokens=1)
        engine.add_documents([Document("later", "Another island trades in silk and silk.")])
        later = engine.answer("Who trades in silk and silk?", max_tokens=1, top_k=5)
    assert (after.strategy, after.notices) == ("fusion", ())
    for answer in (before, given, later):
        assert (answer.strategy, answer.exact_to, answer.notices) == ("prefix", "full", ())
    assert (named.strategy, named.notices) == ("fusion", ()), "as it was asked for"


def test_what_replay_sees_changes_the_setting_once(caplog: pytest.LogCaptureFixture) -> None:
    contract = automatic()
    seen: list[tuple[str, Divergence]] = []
    contract.observer = lambda strategy, one: seen.append((strategy, one))
    for _ in range(LEAST):
        assert contract.notices == ()
        contract.observe(BLEND[1], False, Divergence(0.2, 0.5))
    assert seen == [("blend", Divergence(0.2, 0.5))] * LEAST
    assert contract.pick == BLEND[2] and len(caplog.records) == 1
    assert (
        "found blend at 0.15 outside the quality budget KL=0.1; the recompute ratio was raised" in contract.notices[0]
    )
    stats = contract.stats()
    assert stats["shadow_escalations_total"] == {"raise": 1, "exact": 0, "fault": 0}
    assert stats["shadow_replays_total"] == {"replayed": LEAST, "dropped": 0, "failed": 0}


@pytest.mark.parametrize("contract", [automatic(), Contract(FULL, "float32")])
def test_an_exact_answer_that_is_not_ends_all_reuse(contract: Contract) -> None:
    contract.observe(PREFIX, True, Divergence(1e-9, 1.0))
    assert contract.pick != FULL and not contract.faulted
    for _ in range(2):
        contract.observe(PREFIX, True, Divergence(0.01, 1.0))
    contract.observe(BLEND[1], False, Divergence(9.0, 0.0))
    assert contract.setting == FULL and contract.faulted and "labelled exact and is not" in contract.notices[0]
    assert contract.stats()["shadow_faults_total"] == 2
    assert contract.stats()["shadow_escalations_total"] == {"raise": 0, "exact": 0, "fault": 1}


def test_the_share_of_requests_drawn() -> None:
    contract = Contract(PREFIX, "float32", shadow_rate=0.2)
    assert 300 < sum(contract.draws() for _ in range(2000)) < 500
    assert not any(Contract(PREFIX, "float32").draws() for _ in range(10))
    contract = automatic()
    watched = [sum(contract.draws(picked) for _ in range(2000)) for picked in (True, False)]
    assert 0.5 * WATCH < watched[0] / 2000 < 1.5 * WATCH and not watched[1], "what auto picks is watched"


# ----------------------------------------------------------------------------------- planted faults


class Crooked(Naive):
    """Naive, but cached chunks are read 7 positions off."""

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        def bent(spans: tuple[Span, ...]) -> tuple[Span, ...]:
            cached = [s.indices[0] >= SYSTEM and not allocation.own_pages.issuperset(s.run.pages) for s in spans]
            return tuple(replace(s, offset=s.offset + 7) if c else s for s, c in zip(spans, cached, strict=True))

        talk = super().prefill(prompt, allocation, ratio)
        try:
            step = next(talk)
            while True:
                step = talk.send((yield replace(step, spans=bent(step.spans))))
        except StopIteration as stop:
            plan: Plan = stop.value
            return replace(plan, spans=bent(plan.spans))


class Selective(Naive):
    """Computes everything from a ratio of one half on, and nothing below: selective in name."""

    name = "selective"
    selective = True

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        return Full().prefill(prompt, allocation) if (ratio or 0) >= 0.5 else super().prefill(prompt, allocation)


def question(seed: int, chunks: tuple[int, ...] = (40, 40)) -> gate.Question:
    reference = np.random.default_rng(seed + 99).integers(0, 256, 6).astype(np.int32)
    return gate.Question(tiny.prompt(seed, chunks=chunks), reference)


QUESTIONS = tuple(question(seed) for seed in range(4))


def overwrite(engine: Engine, tokens: Tokens) -> None:
    """A stale page: slots of the node that holds `tokens` get the KV of others."""

    def run() -> None:
        nodes = [node for node in engine._cache.tree.nodes() if node.run is not None]
        (hit,) = [node for node in nodes if np.array_equal(node.tokens, tokens)][:1]
        other = next(node for node in nodes if node is not hit and len(node.tokens) >= 16)
        target, source = hit.run.slots(tiny.PAGE)[:16], other.run.slots(tiny.PAGE)[:16]
        engine._runner.move(source, target, np.zeros(16, np.int32), (0, tiny.CONFIG.num_layers))

    engine._loop.call(run)


pytestmark = pytest.mark.engine(extra=[Selective()])


def measure(engine: Engine, *settings: Setting) -> list[Measurement]:
    return list(gate.measure(engine, QUESTIONS, settings, lambda: None))


@pytest.mark.slow
def test_the_gate_measures_what_is_there(engine: Engine) -> None:
    settings = gate.settings_of({s.name: s for s in (Full(), Prefix(), Naive(), Selective())}, None, (0.2, 0.7))
    assert settings == (PREFIX, NAIVE, *(Setting("selective", ratio) for ratio in (None, 0.2, 0.7)))
    steps: list[None] = []
    prefix, naive, own, low, high = gate.measure(engine, QUESTIONS, settings, lambda: steps.append(None))
    assert len(steps) == gate.count_answers(len(QUESTIONS), settings)
    assert (prefix.n, prefix.top1) == (4, 1.0) and prefix.kl < 1e-9 and prefix.share == 1.0
    assert naive.kl == own.kl == low.kl and 0.001 < naive.kl < naive.kl_hi and naive.share == 0.0
    assert high.kl < 1e-9 and high.share == 1.0
    assert all(one.ttft_ms > 0 for one in (prefix, naive, own, low, high))


@pytest.mark.slow
def test_no_setting_of_the_gate_profits_from_what_another_one_kept() -> None:
    """Cache-Craft that recomputes a whole chunk keeps it as a variant that is exact behind this very prompt."""
    at_0, at_15 = Setting("craft", 0.0), Setting("craft", 0.15)

    def measured(*settings: Setting) -> list[float]:
        with tiny.engine(extra=[Craft(alpha=2.0)]) as engine:
            return [one.kl for one in gate.measure(engine, QUESTIONS[:2], settings, lambda: None)]

    _, *others = measured(Setting("craft"), at_0, at_15)
    assert others == pytest.approx([*measured(at_0), *measured(at_15)]) and min(others) > 1e-6


def test_the_gate_finds_a_wrong_offset() -> None:
    with tiny.engine(extra=[Crooked()]) as engine, pytest.raises(gate.BrokenCache, match="naive is labelled exact"):
        measure(engine, NAIVE)


class Void(Naive):
    """Naive, whose last logits are no numbers where it is not exact."""

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        plan = yield from super().prefill(prompt, allocation)
        return plan if plan.exact_to else replace(plan, logits=np.full_like(plan.logits, np.nan))


def test_the_gate_finds_logits_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine(extra=[Void()]) as engine:
        with pytest.raises(gate.BrokenCache, match="an answer of naive are no finite numbers"):
            measure(engine, NAIVE)
        monkeypatch.setattr(gate, "_ask", lambda engine, question, *_, **__: engine.answer_prompt(
            question.prompt, strategy="naive", continuation=question.reference, max_tokens=1))  # fmt: skip
        with pytest.raises(ConfigError, match="full attention are no finite numbers"):
            measure(engine, PREFIX)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [PREFIX, NAIVE], ids=str)
@pytest.mark.smoke
def test_the_gate_finds_a_stale_page(engine: Engine, setting: Setting) -> None:
    measure(engine, setting)
    part = 0 if setting == PREFIX else 1
    overwrite(engine, QUESTIONS[0].prompt.segments[part].tokens)
    with pytest.raises(gate.BrokenCache, match=f"{setting} is labelled exact"):
        measure(engine, setting)


def test_prompts_of_the_gate() -> None:
    one = question(0, (4, 5, 6))
    assert [s.id for s in one.turned.segments] == ["system", "chunk2", "chunk1", "chunk0", "question"]
    assert [s.id for s in one.alone.prompt.segments] == ["system", "chunk0", "question"]
    assert gate.digest([one]) == gate.digest([question(0, (4, 5, 6))]) != gate.digest([one.alone])
    assert Kind.CHUNK in {s.kind for s in one.alone.prompt.segments}


# ------------------------------------------------------------------------------------ shadow replay


def live(engine: Engine, rounds: int, prompts: tuple[Prompt, ...], **options: Any) -> Answer:
    """Requests one after the other, each replayed before the next; the last answer."""
    for i in range(rounds):
        before = replays(engine)
        answer = engine.answer_prompt(prompts[i % len(prompts)], max_tokens=6, **options)
        until(lambda: replays(engine) > before)  # noqa: B023
    return answer


def warm(engine: Engine, prompts: tuple[Prompt, ...]) -> None:
    """Keep the isolated KV of their chunks."""
    for prompt in prompts:
        engine.answer_prompt(prompt, strategy="naive", max_tokens=1, background=True)


def replays(engine: Engine) -> float:
    return sum(engine.stats()["shadow_replays_total"].values())


def shadowed(**options: Any) -> Contract:
    """A contract that picks naive by a budget between sound and faulty, and replays every request."""
    measured = report(measurement(NAIVE, SOUND, 1.0, margin=0.0), measurement(PREFIX, 0.0, 9.0, 1.0, 0.0))
    budget = Budget((SOUND + FAULTY) / 2)
    return automatic(measured, budget, shadow_rate=1.0, **options)


PROMPTS = tuple(marked(tiny.prompt(seed, chunks=(40, 33, 57))) for seed in range(5))


@pytest.mark.slow
@pytest.mark.smoke
def test_replays_of_sound_requests_change_nothing() -> None:
    with tiny.engine(contract=shadowed(), extra=[Selective()]) as engine:
        found: list[tuple[str, Divergence]] = []
        engine.observe_shadows(lambda strategy, one: found.append((strategy, one)))
        warm(engine, PROMPTS)
        answer = live(engine, LEAST + 5, PROMPTS)
        exact = live(engine, 2, PROMPTS[:1], strategy="prefix")
        assert (answer.strategy, answer.exact_to, answer.predicted) == ("naive", None, Divergence(SOUND, 0.9))
        assert answer.notices == () and exact.predicted == Divergence(0.0, 1.0)
        assert engine.contract.pick == NAIVE
        stats = engine.stats()
        assert stats["shadow_replays_total"] == {"replayed": LEAST + 7, "dropped": 0, "failed": 0}
        assert stats["requests_total"] == {"naive": LEAST + 5, "prefix": 2}, "replays are not counted"
        assert stats["shadow_faults_total"] == 0
        assert [name for name, _ in found] == ["naive"] * (LEAST + 5) + ["prefix"] * 2
        assert np.mean([one.kl for _, one in found[:-2]]) == pytest.approx(SOUND, rel=0.2)
        assert found[-1][1].kl < 1e-9


def test_replay_finds_a_wrong_offset(caplog: pytest.LogCaptureFixture) -> None:
    with tiny.engine(contract=shadowed(), extra=[Crooked()]) as engine:
        warm(engine, PROMPTS)  # chunks are bent when read
        live(engine, LEAST, PROMPTS)
        assert engine.contract.pick == PREFIX
        later = engine.answer_prompt(PROMPTS[0], max_tokens=1)
        asked = engine.answer_prompt(PROMPTS[0], strategy="naive", max_tokens=1)
    assert (later.strategy, later.exact_to) == ("prefix", "full")
    assert "shadow replay found naive outside the quality budget" in later.notices[0]
    assert asked.strategy == "naive" and asked.notices == ()
    assert sum("shadow replay found" in record.message for record in caplog.records) == 1


def test_replay_finds_a_stale_page_behind_an_exact_label() -> None:
    with tiny.engine(contract=Contract(PREFIX, "float32", shadow_rate=1.0)) as engine:
        engine.answer_prompt(PROMPTS[0], max_tokens=1)  # nothing was reused: nothing to replay
        assert live(engine, 1, PROMPTS[:1]).exact_to == "full" and engine.stats()["shadow_faults_total"] == 0
        (node,) = [n for n in engine._cache.tree.nodes() if n.run is not None and len(n.tokens) == 20]
        overwrite(engine, node.tokens)
        live(engine, 1, PROMPTS[:1])
        later = engine.answer_prompt(PROMPTS[0], max_tokens=1)
        assert engine.stats()["shadow_faults_total"] == 1
    assert later.strategy == "full" and "labelled exact and is not" in later.notices[0]


def test_only_a_fault_concerns_requests_for_a_graph() -> None:
    contract, graph = automatic(), Graph(relation_paths=(("A", "likes", "B"),))
    with tiny.engine(contract=contract) as engine:
        for strategy in (None, AUTO):
            facts = engine.answer("Who?", graph=graph, strategy=strategy, max_tokens=1)
            assert (facts.strategy, facts.notices) == ("dependency", ())
        contract.observe(PREFIX, True, Divergence(0.01, 1.0))
        found = [engine.answer("Who?", graph=graph, strategy=strategy, max_tokens=1) for strategy in (None, AUTO)]
        named = engine.answer("Who?", graph=graph, strategy="dependency", max_tokens=1)
    for later in found:
        assert later.strategy == "full" and "labelled exact and is not" in later.notices[0]
    assert (named.strategy, named.notices) == ("dependency", ())


def test_auto_may_be_named_where_another_strategy_is_the_default() -> None:
    """And any other where auto is."""
    measured = shadowed()._report
    with tiny.engine(contract=Contract(PREFIX, "float32", report=measured, budget=Budget(0.1))) as engine:
        named, plain = (engine.answer_prompt(PROMPTS[0], strategy=name, max_tokens=1) for name in (AUTO, None))
        bare = engine.answer_prompt(tiny.prompt(), strategy=AUTO, max_tokens=1)
        with pytest.raises(RequestError, match="auto takes no recompute_ratio"):
            engine.answer_prompt(PROMPTS[0], strategy=AUTO, recompute_ratio=0.5)
        assert engine.strategies[0] == AUTO
    assert [one.strategy for one in (plain, named, bare)] == ["prefix", "naive", "prefix"]
    with tiny.engine(contract=automatic(measured)) as engine:
        plain, named = (engine.answer_prompt(PROMPTS[0], strategy=name, max_tokens=1) for name in (None, "prefix"))
        again = engine.answer_prompt(PROMPTS[0], max_tokens=1)
    assert (named.strategy, named.exact_to, plain.strategy) == ("prefix", "full", "naive")
    assert again.strategy == "prefix" and "prefix 0: the request ran prefix" in again.notices[0]


@pytest.mark.slow
def test_replays_wait_for_others_and_not_without_end() -> None:
    contract = Contract(NAIVE, "float32", shadow_rate=1.0)
    with tiny.engine(contract=contract) as engine:
        futures = [engine.begin_prompt(PROMPTS[i % 5], max_tokens=2 + STEPS) for i in range(QUEUE + 6)]
        for future in futures:
            future.result()
        until(lambda: replays(engine) == len(futures))
        stats = engine.stats()["shadow_replays_total"]
    assert stats["failed"] == 0
    assert stats["replayed"] >= QUEUE and stats["replayed"] + stats["dropped"] == len(futures)


def test_kv_that_lost_precision_was_not_measured() -> None:
    with tiny.engine(contract=shadowed(), at_rest="int4", host_bytes=2**24) as engine:
        warm(engine, PROMPTS[:1])
        for _ in range(2):
            fresh = live(engine, 1, PROMPTS[:1])
        assert fresh.cached_tokens and fresh.predicted == Divergence(SOUND, 0.9) and fresh.notices == ()
        engine._loop.call(engine._cache.vacate)
        before = engine.contract._monitor._seen.copy()
        rounded = live(engine, 1, PROMPTS[:1])
        named = live(engine, 1, PROMPTS[:1], strategy="prefix")
        after = engine.contract._monitor._seen
        assert {segment.tier for segment in rounded.segments} == {"host", None}
        assert rounded.strategy == "naive" and (rounded.exact_to, rounded.predicted) == (None, None)
        assert "lost precision at rest" in rounded.notices[0]
        assert (named.exact_to, named.predicted, named.notices) == (None, None, ())
        assert after == before, "what replay sees of it is not held against the budget"


def test_with_more_chunks_than_were_measured_a_budget_runs_prefix() -> None:
    many = marked(tiny.prompt(chunks=(20,) * 4))
    with tiny.engine(contract=shadowed()) as engine:
        answer = engine.answer_prompt(many, max_tokens=2)
        named = engine.answer_prompt(many, max_tokens=2, strategy="naive")
        assert (answer.strategy, answer.exact_to, answer.predicted) == ("prefix", "full", Divergence(0.0, 1.0))
        assert "up to 3 chunks, and here are 4" in answer.notices[0]
        assert (named.strategy, named.predicted, named.notices) == ("naive", None, ())


def test_a_replay_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine(contract=Contract(NAIVE, "float32", shadow_rate=1.0)) as engine:

        def fail(strategy: str, seen: Divergence) -> None:
            raise ZeroDivisionError

        engine.observe_shadows(fail)
        live(engine, 2, PROMPTS)
        assert engine.stats()["shadow_replays_total"]["failed"] == 2


# ------------------------------------------------------------------------------------------ learning


TRIED = (NAIVE, Setting("anchor", 0.0))


def learning(budget: float, path: Path | None = None, candidates: tuple[Setting, ...] = TRIED) -> Contract:
    budgeted = Budget(budget)
    return automatic(None, budgeted, evidence=LiveEvidence(report(), budgeted, candidates), path=path)


def show(contract: Contract, kl: float) -> None:
    """What a request shows of the candidates: naive is this far off, the other one further."""
    seen = {NAIVE: Divergence(kl, 0.9), TRIED[1]: Divergence(9.0, 0.0)}
    contract.learn(3, {one: ShadowTrial(seen[one], 10.0, 0.0) for one in contract.candidates})


def test_auto_switches_when_enough_live_requests_lie_inside_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contract, chunks = learning(0.1, tmp_path / "ab12.json"), marked(tiny.prompt())
    assert contract.uncovered(chunks) is None and contract.draws(True) and not contract.draws()
    for count in range(NEEDED):
        assert contract.pick == PREFIX and not (tmp_path / "ab12.json").exists()
        assert contract.summary == f"auto: prefix; {count} of {NEEDED} requests tried"
        assert (TRIED[1] in contract.candidates) == (count < NEEDED // 2), "what is surely outside is not tried again"
        show(contract, 0.05)
    assert contract.pick == NAIVE and contract.candidates == ()
    assert f"after {NEEDED} replayed requests: auto: naive" in caplog.text
    made = Report.load(tmp_path / "ab12.json", "ab12")
    assert (made.top_k, [one.setting for one in made.measurements]) == (3, [NAIVE])
    assert contract.predicted(NAIVE, False, 3) == Divergence(pytest.approx(0.05), pytest.approx(0.9))
    assert contract.uncovered(marked(tiny.prompt(chunks=(20,) * 4))), "so many were not seen"
    for _ in range(LEAST):
        contract.observe(NAIVE, False, Divergence(0.2, 0.5))
    assert contract.pick == PREFIX and "found naive outside" in contract.notices[0]
    assert not (tmp_path / "ab12.json").exists(), "the next start learns anew"


@pytest.mark.parametrize("kl", [0.11, math.inf])
def test_auto_does_not_switch_to_what_is_outside_or_in_doubt(kl: float) -> None:
    contract = learning(0.1)
    for i in range(MOST):
        assert contract.pick == PREFIX
        show(contract, kl + 0.1 * (-1) ** i)
    assert contract.pick == PREFIX and contract.candidates == () and contract.summary == "auto: prefix"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 1e-9])
def test_an_engine_learns_from_live_requests_in_idle_time(budget: float) -> None:
    with tiny.engine(contract=learning(budget, candidates=(NAIVE,))) as engine:
        warm(engine, PROMPTS)
        for i in range(NEEDED):
            before = engine.contract.summary
            answer = engine.answer_prompt(PROMPTS[i % 5], max_tokens=6)
            assert (answer.strategy, answer.exact_to) == ("prefix", "full")
            until(lambda: engine.contract.summary != before or not engine.contract.candidates)  # noqa: B023
        picked = NAIVE if budget == 1.0 else PREFIX
        until(lambda: engine.contract.pick == picked)
        other = marked(tiny.prompt(9, chunks=(40, 33, 57)))
        warm(engine, (other,))
        later = engine.answer_prompt(other, max_tokens=1)
        assert later.strategy == picked.strategy


# ----------------------------------------------------------------------------- what requests may say


def test_ratios_of_requests(engine: Engine) -> None:
    prompt = PROMPTS[0]
    chosen = engine.answer_prompt(prompt, strategy="selective", recompute_ratio=0.5, max_tokens=1)
    assert (chosen.recompute_ratio, chosen.exact_to, chosen.predicted) == (0.5, "full", Divergence(0.0, 1.0))
    own = engine.answer_prompt(prompt, strategy="selective", max_tokens=1)
    assert (own.recompute_ratio, own.exact_to, own.predicted) == (None, None, None)
    with pytest.raises(RequestError, match=r"naive takes no recompute_ratio; these do: .*selective"):
        engine.answer_prompt(prompt, strategy="naive", recompute_ratio=0.5)
    with pytest.raises(RequestError, match="recompute_ratio must be less than or equal to 1"):
        engine.answer_prompt(prompt, strategy="selective", recompute_ratio=1.5)


def test_the_default_ratio_goes_with_its_strategy() -> None:
    default = Contract(Setting("selective", 0.75), "float32")
    with tiny.engine(contract=default, extra=[Selective()]) as engine:
        ratios = [
            engine.answer_prompt(PROMPTS[0], max_tokens=1, **options).recompute_ratio
            for options in ({}, {"strategy": "selective"}, {"recompute_ratio": 0.25}, {"strategy": "naive"})
        ]
    assert ratios == [0.75, 0.75, 0.25, None]


def test_settings_of_a_start() -> None:
    known = {strategy.name: strategy for strategy in (Full(), Prefix(), Naive(), Selective())}

    def setting(**options: Any) -> Setting:
        return loading._setting(EngineOptions("none", **options), known)

    assert setting() == Setting(AUTO) and setting(strategy="prefix") == PREFIX
    assert setting(strategy="selective", recompute_ratio=0.3) == Setting("selective", 0.3)
    for message, wrong in (
        ("auto takes no recompute ratio", {"recompute_ratio": 0.2}),
        ("unknown strategy 'magic'; choose one of auto, full", {"strategy": "magic"}),
        ("naive takes no recompute ratio", {"strategy": "naive", "recompute_ratio": 0.2}),
        ("recompute_ratio must be less than or equal to 1", {"strategy": "selective", "recompute_ratio": 1.2}),
    ):
        with pytest.raises(ConfigError, match=message):
            setting(**wrong)
    with pytest.raises(ConfigError, match="full and prefix"):
        loading._check_strategies(EngineOptions("none"), {"naive": Naive()})
    with pytest.raises(ConfigError, match="the strategy full"):
        loading._check_strategies(EngineOptions("none", strategy="naive", shadow_rate=0.1), {"naive": Naive()})


def test_the_report_that_a_start_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    identity, known = bytes.fromhex("ab12"), {"prefix": Prefix()}
    assert report_of(identity, known) is None
    REPORT.save(report_path(identity))
    found = report_of(identity, known)
    assert [one.setting for one in found.measurements] == [PREFIX], "others are not known here"


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_the_shipped_report_is_of_the_packaged_model(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "smollm2-135m-instruct"
    local, digest = resolve(name), model_digest(resolve(name), cache_dir())
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    config = open_checkpoint(local.path).config.to_json()
    parts = (
        digest,
        Tokenizer.load(local.path).digest,
        config.encode(),
        dtype.encode(),
    )  # as an engine's start has them
    identity = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
    found = report_of(identity, strategies())
    assert found is not None, (
        f"ragjax/quality has no report of {name} in {dtype} as it is now: make one by `ragjax gate --model {name} "
        f"--dtype {dtype} --budget KL=0.05`, and copy it there from $RAGJAX_CACHE/quality"
    )
    assert (found.model, found.dtype) == (name, dtype) and min(one.n for one in found.measurements) >= 24
    assert Contract(Setting(AUTO), dtype, report=found).pick != PREFIX
    own = replace(found, measurements=found.measurements[:1])
    own.save(report_path(identity))
    assert report_of(identity, strategies()) == own, "the user's own comes first"


@pytest.mark.parametrize(
    ("change", "message"), [({"alpha": 1.0}, ""), ({"alpha": 0.4}, "another alpha"), ({"version": 1}, "not version 2")]
)
def test_a_report_of_an_earlier_version_is_used_or_left_with_a_warning(
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    REPORT.save(path := report_path(b"\xab\x12"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert report_of(b"\xab\x12", strategies()) == (None if message else REPORT)
    assert message in caplog.text and ("ragjax gate" in caplog.text) is bool(message)


# ------------------------------------------------------------------------------------------- command


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--budget"),
        (["--budget", "0.05"], 'write "KL=0.05"'),
        (["--budget", "KL=1", "--limit", "1"], "--limit"),
        (["--budget", "KL=1", "--strategies", "naive,magic"], "magic"),
        (["--budget", "KL=1", "--strategies", "full"], "another strategy"),
        (["--budget", "KL=1", "--frobnicate"], "--frobnicate"),
        (["--budget", "KL=1", "--device-cache-gb", "0"], "--device-cache-gb"),
        (["--budget", "KL=1", "--top-k", "0"], "--top-k"),
        (["--budget", "KL=1", "--json", "nowhere/out.json"], "--json"),
        (["--budget", "KL=1", "--json", "."], "--json"),
        (["--budget", "KL=1", "--knowledge", "demo"], "--questions"),
        (["--budget", "KL=1", "--questions", "questions.jsonl"], "--knowledge"),
    ],
)
def test_bad_flag_of_the_gate_is_one_line_and_code_2(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate.main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err


def test_questions_of_a_file_are_read_or_refused(engine: Engine, tmp_path: Path) -> None:
    engine.add_documents([Document("a", "The ferry leaves at nine.")])
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Where?", "answers": ["Here."]}\n{"question": "Who?", "answers": ["A.", "B."]}\n')
    found = gate.demo_questions(engine, None, file)
    assert [bytes(one.reference.astype(np.uint8)) for one in found] == [b"Here.", b"A."]
    few = ('{"question": "Where?", "answers": "Here"}', '{"question": "Where?", "answers": [" "]}')
    for wrong in ("{}", '{"question": "Where?", "answers": []}', *few, "nothing"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="each line must be"):
            gate.demo_questions(engine, None, file)


def test_what_is_named_twice_is_measured_once() -> None:
    options = gate._options(["--budget", "KL=1", "--strategies", "naive, selective,naive"])
    known = {strategy.name: strategy for strategy in (Full(), Prefix(), Naive(), Selective())}
    settings = gate.settings_of(known, options.strategies)
    assert settings == (NAIVE, *(Setting("selective", ratio) for ratio in (None, *gate.RATIOS)))


@pytest.mark.parametrize(("budget", "chosen"), [("KL=0.1", "blend at 0.15"), ("KL=0.1,TOP1=1", "prefix")])
def test_the_command_says_what_the_budget_picks(
    budget: str, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gate, "_measured", lambda options: REPORT)
    assert gate.main(["--budget", budget, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert f"picks {chosen}" in out and sum("<- chosen" in line for line in out.splitlines()) == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert Setting(**written["chosen"]) == REPORT.cheapest(Budget.parse(budget))


def test_the_command_keeps_its_report_where_a_start_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "BUNDLED", tmp_path / "questions.jsonl")
    documents = [
        Document(name, f"The {name} of Marn is {i} miles off.", name) for i, name in enumerate(("mill", "inn"))
    ]
    asked = [
        {"question": f"Where is the {d.id} of Marn?", "answers": [f"{i} miles off"]} for i, d in enumerate(documents)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(one) for one in asked))
    loaded: dict[str, Any] = {}

    def load(options: EngineOptions, **changes: Any) -> Engine:
        loaded.update(vars(replace(options, **changes)))
        made = tiny.engine(identity=b"\xab\x12", top_k=options.top_k)
        made.add_documents(documents)
        return made

    monkeypatch.setattr(gate.Engine, "load", load)
    assert (
        gate.main(["--budget", "KL=0.5", "--strategies", "prefix,naive,moved", "--top-k", "2", "--dtype", "float32"])
        == 0
    )
    assert loaded["knowledge"] == knowledge("demo") and loaded["dtype"] == "float32"
    found = report_of(b"\xab\x12", {"prefix": Prefix(), "naive": Naive(), "moved": Moved()})
    assert (found.model, found.dtype, found.top_k) == ("tiny", "float32", 2)
    prefix, naive = found.measurements
    assert (prefix.setting, prefix.n, naive.setting) == (PREFIX, 2, NAIVE)
    assert prefix.kl < 1e-9 < naive.kl
    assert (found.conversations.setting, found.conversations.n) == (MOVED, 2)
    assert found.conversations.kl > 1e-9, "no text of the earlier turn was reused"
    assert loaded["compile"] and loaded["storage"].host_gb == gate.HOST_GB


@pytest.mark.parametrize("count", [0, 1])
def test_a_report_takes_two_questions(
    count: int, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.add_documents([Document("a", "The ferry leaves at nine.")])
    monkeypatch.setattr(gate.Engine, "load", lambda *_, **__: engine)
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Where?", "answers": ["Here."]}\n' * count)
    flags = ["--budget", "KL=1", "--strategies", "prefix", "--knowledge", str(tmp_path), "--questions", str(file)]
    assert gate.main(flags) == 2
    assert f"at least 2 questions, not {count}" in capsys.readouterr().err


def test_the_command_tells_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    approximate = replace(REPORT, measurements=REPORT.measurements[1:])
    monkeypatch.setattr(gate, "_measured", lambda options: approximate)
    assert gate.main(["--budget", "KL=0"]) == 1
    assert "nothing lies inside" in capsys.readouterr().out
    talks = replace(REPORT, conversations=measurement(MOVED, 0.02, 5.0))
    monkeypatch.setattr(gate, "_measured", lambda options: talks)
    assert [gate.main(["--budget", budget]) for budget in ("KL=0.05", "KL=0.001")] == [0, 0]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("conversations")]
    assert said == ["conversations get moved", "conversations get prefix"]

    def broken(options: object) -> Report:
        raise gate.BrokenCache("an answer of prefix is labelled exact")

    monkeypatch.setattr(gate, "_measured", broken)
    assert gate.main(["--budget", "KL=1"]) == 1
    assert "THE CACHE IS BROKEN" in capsys.readouterr().err
