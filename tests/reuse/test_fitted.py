"""`fitted`, its signals, and budgets of requests, against formulas over dense float64 attention."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragjax.core import Kind, Prompt, RequestError, Segment
from ragjax.core.fit import Fit, Forecast
from ragjax.reuse import strategies
from ragjax.reuse.anchor import Anchored, Valued
from ragjax.reuse.base import segments_of
from ragjax.reuse.budget import EXPECTED, RATIO, Fitted, entropy
from ragjax.reuse.fitted import Weighted
from ragjax.reuse.repair import Selective
from ragjax.reuse.select import share
from ragjax.reuse.signals import NAMES, NEAR, QUARTERS
from ragjax.reuse.stitch import Stitched
from ragjax.reuse.trial import Drawn, Once, Told
from tests.support import tiny
from tests.support.executor import Array, Executor, model
from tests.support.literal import (
    FIT,
    chosen_of,
    counted,
    drifts,
    highest,
    indices_of,
    isolated,
    joins,
    preprocessed,
    repaired,
)

WEIGHTS = FIT.weights
LADDER = (0.0, 0.1, 0.3)
HELD = tuple(((math.log(x) - 0.1, x), (-9.0, 0.0), (-9.0, 0.0)) for x in np.linspace(0.01, 1.0, 19))
FORECAST = Forecast(LADDER, intercept=0.0, slope=1.0, mass=0.0, uncertainty=0.0, held=HELD)
"""KL = 1 - part, which held-out prompts exceeded by a factor of exp(0.1)."""

FITTED = strategies(fit=Fit(WEIGHTS, 3, FORECAST))["fitted"]


def anchored(executor: Executor, prompt: Prompt) -> tuple[Prompt, tuple[Array, Array]]:
    """The prompt with its chunks preprocessed but the first, and the KV that they then have."""
    prompt, (k, v) = preprocessed(executor, prompt)
    first = np.arange(prompt.starts[1], prompt.starts[2])
    for mixed, alone in zip((k, v), isolated(prompt), strict=True):
        mixed[:, first] = alone[:, first]
    return prompt, (k, v)


def literal(prompt: Prompt, kept: tuple[Array, Array], tokens: list[int]) -> dict[str, list[float]]:
    """Every signal as its definition says, token by token."""
    dense = model().dense(prompt.tokens, rows=joins(prompt), kept=kept)
    asking = np.arange(prompt.starts[-2], len(prompt))
    layers, heads, group = len(dense.prob), dense.prob.shape[2], dense.prob.shape[2] // dense.v.shape[2]

    def attention(layer: int, token: int, valued: bool) -> float:
        total = 0.0
        for head in range(heads):
            norm = float(np.linalg.norm(dense.v[layer, token, head // group])) if valued else 1.0
            total += float(dense.prob[layer][asking, head, token].sum()) * norm / heads
        return total

    plain = [{t: attention(layer, t, False) for t in tokens} for layer in range(layers)]
    valued = [{t: attention(layer, t, True) for t in tokens} for layer in range(layers)]
    whole = {t: sum(one[t] for one in valued) for t in tokens}
    chunk = {t: i for i in range(len(prompt.segments)) for t in range(prompt.starts[i], prompt.starts[i + 1])}
    found: dict[str, list[float]] = {}
    for q in range(QUARTERS):
        begin, end = q * layers // QUARTERS, max((q + 1) * layers // QUARTERS, q * layers // QUARTERS + 1)
        found[f"attention-{q + 1}"] = [sum(plain[layer][t] for layer in range(begin, end)) for t in tokens]
        found[f"received-{q + 1}"] = [sum(valued[layer][t] for layer in range(begin, end)) for t in tokens]
    found["attention-last"] = [plain[-1][t] for t in tokens]
    found["attention-even"] = [sum(one[t] / sum(one.values()) for one in plain) for t in tokens]
    found["received-root"] = [math.sqrt(whole[t]) for t in tokens]
    beside = {t: [o for o in tokens if o != t and abs(o - t) <= NEAR and chunk[o] == chunk[t]] for t in tokens}
    found["nearby"] = [sum(whole[o] for o in beside[t]) for t in tokens]
    mates = {t: [o for o in tokens if chunk[o] == chunk[t]] for t in tokens}
    found["chunk"] = [sum(whole[o] for o in mates[t]) / len(mates[t]) for t in tokens]
    found["start"] = [1 / (1 + t - prompt.starts[chunk[t]]) for t in tokens]
    found["received-start"] = [whole[t] / (1 + t - prompt.starts[chunk[t]]) for t in tokens]
    found["place"] = [1.0 for _ in tokens]
    marked = {i for i, s in enumerate(prompt.segments) if s.kind is Kind.CHUNK and s.behind}
    found["isolated"] = [0.0 if chunk[t] in marked else 1.0 for t in tokens]
    drift = {prompt.starts[i] + n: d for i in marked for n, d in enumerate(drifts(prompt, i, behind_of(prompt, i)))}
    known = [drift[t] for t in tokens if t in drift]
    mean = sum(known) / len(known) if known else 1.0
    found["drift"] = [drift.get(t, mean) for t in tokens]
    found["received-drift"] = [whole[t] * drift.get(t, mean) for t in tokens]
    found["even-drift"] = [x * drift.get(t, mean) for t, x in zip(tokens, found["attention-even"], strict=True)]
    found["last-drift"] = [x * drift.get(t, mean) for t, x in zip(tokens, found["attention-last"], strict=True)]
    found["late-drift"] = [sum(one[t] for one in valued[layers // 2 :]) * drift.get(t, mean) for t in tokens]
    return {name: [x / (sum(row) or 1.0) for x in row] for name, row in found.items()}


def behind_of(prompt: Prompt, i: int) -> list[Segment]:
    """What `preprocessed` computes a chunk behind."""
    return [prompt.segments[j] for j in reversed(segments_of(prompt, Kind.CHUNK)) if j != i]


def candidates(prompt: Prompt) -> list[int]:
    """Chunk tokens behind the first chunk."""
    return [int(t) for t in indices_of(prompt, Kind.CHUNK) if t >= prompt.starts[2]]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_is_what_its_definition_says_and_chooses_by_it(name: str) -> None:
    executor, seen = Executor(stages=(0, 1, 2, 3)), Once()
    prompt, kept = anchored(executor, tiny.prompt(24))
    executor.run(Selective("one", Anchored(), Told({name: 1.0}, seen)), prompt, 0.15)
    tokens, found = candidates(prompt), seen.found
    assert found is not None and list(found.tokens) == tokens
    expected = literal(prompt, kept, tokens)[name]
    np.testing.assert_allclose(
        found.share_SN[NAMES.index(name)], expected, rtol=2e-3 if "drift" in name else 1e-4, atol=1e-7
    )
    assert found.share_SN.sum(1) == pytest.approx(np.where(found.share_SN.any(1), 1.0, 0.0))


def test_fitted_recomputes_the_highest_weighted_signals() -> None:
    executor = Executor(stages=(0, 1, 2, 3))
    prompt, kept = anchored(executor, tiny.prompt(24))
    tokens = candidates(prompt)
    signals = literal(prompt, kept, tokens)
    scores = {t: sum(w * signals[name][i] for name, w in WEIGHTS.items()) for i, t in enumerate(tokens)}
    for ratio in (0.05, 0.15):
        done = executor.run(FITTED, prompt, ratio)
        assert chosen_of(done, prompt) == highest(scores, counted(prompt, ratio))
        np.testing.assert_allclose(done.logits, repaired(prompt, kept, chosen_of(done, prompt)), atol=1e-5)
    assert done.plan.exact_to is None


def test_fitted_with_the_weights_of_ragjax_chooses_alike() -> None:
    executor = Executor(stages=(0, 2, 3))
    prompt, _ = anchored(executor, tiny.prompt(27))
    alike = executor.run(Selective("last", Anchored(), Valued()), prompt, 0.2)
    assert chosen_of(executor.run(Selective("f", Anchored(), Weighted({"received-4": 1})), prompt, 0.2), prompt) == (
        chosen_of(alike, prompt)
    )


def test_one_chunk_alone_is_full_within_any_budget() -> None:
    prompt, executor = tiny.prompt(12, chunks=(50,)), Executor()
    assert isinstance(FITTED, Fitted)
    for kl in (0.001, 2.0):
        done = executor.run(FITTED.within(kl), prompt)
        np.testing.assert_allclose(done.logits, model().dense(prompt.tokens).logits[-1], atol=1e-5)
        assert done.plan.exact_to == "full" and done.plan.figures == {RATIO: 0.0, EXPECTED: 0.0}


def test_weights_are_of_known_signals_and_not_negative() -> None:
    for wrong in ({"luck": 1.0}, {"start": -0.1}):
        with pytest.raises(ValueError, match="weights are of"):
            Weighted(wrong)


def test_trials_differ_and_measure_once() -> None:
    prompt, executor = tiny.prompt(24), Executor()
    once = Once()
    drawn = Drawn(once, np.random.default_rng(3))
    sets, covered = [], []
    for _ in range(3):
        done = executor.run(Selective("trial", Anchored(), drawn), prompt, 0.2)
        sets.append(chosen_of(done, prompt))
        covered.append(drawn.covered_S)
        assert once.found is not None
        np.testing.assert_allclose(drawn.covered_S, once.found.covered(np.array(sets[-1])))
    assert len(done.passes) == 1, "signals are known: only the repair is left"
    assert len({tuple(chosen) for chosen in sets}) == 3 and all(
        (c >= 0).all() and (c <= 1 + 1e-9).all() for c in covered
    )


# ------------------------------------------------------------------------------------------------- budgets


def test_a_budget_takes_the_least_ratio_whose_forecast_is_low_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stitched, "fused", True)  # the chunks here are not preprocessed, and pass for it
    assert isinstance(FITTED, Fitted)
    ratios = []
    for kl in (0.05, 0.3, 0.5, 0.7, 0.85, 0.99, 1.01):
        executor, once = Executor(), Once()
        prompt = tiny.prompt(24)
        weighted = Told(WEIGHTS, once)
        executor.run(Selective("same", Anchored(), weighted), prompt, 0.1)
        assert once.found is not None
        total = len(indices_of(prompt, Kind.CHUNK))
        sets = {ratio: weighted.highest(once.found, share(ratio, total)) for ratio in LADDER}
        left = {ratio: max(1 - weighted.part(once.found, chosen), 1e-3) for ratio, chosen in sets.items()}
        worst = min((x for x in np.linspace(0.01, 1.0, 19) if x > kl), default=math.inf)  # of 19, the one of rank 19
        expected = min((ratio for ratio, kl in left.items() if kl < worst * math.exp(-0.1)), default=1.0)
        done = executor.run(FITTED.within(kl), prompt)
        assert done.plan.figures[RATIO] == expected
        assert done.plan.figures[EXPECTED] == pytest.approx(left.get(expected, 0.0), rel=1e-5)
        assert done.plan.exact_to == ("full" if expected == 1.0 else None)
        chosen = indices_of(prompt, Kind.CHUNK) if expected == 1.0 else sets[expected]
        np.testing.assert_allclose(done.logits, repaired(prompt, isolated(prompt), list(chosen)), atol=1e-5)
        ratios.append(expected)
    assert ratios == sorted(ratios, reverse=True) and len(set(ratios)) >= 3, "a wider budget never takes more"


def test_a_budget_gives_back_slots_that_it_does_not_need() -> None:
    assert isinstance(FITTED, Fitted)
    executor, prompt = Executor(), tiny.prompt(24, chunks=(200, 200))
    held = {}
    for kl in (0.001, 2.0):
        talk = executor.talk(FITTED.within(kl), prompt)
        while talk.step():
            pass
        held[kl] = len(talk.allocation.own_pages)
        talk.close()
    assert held[2.0] < held[0.001]


def test_a_fit_without_a_forecast_takes_no_budget() -> None:
    with pytest.raises(RequestError, match="forecasts no divergence") as refused:
        Fitted(Fit(WEIGHTS, 3)).within(0.1)
    assert refused.value.param == "rag.quality.kl"


def test_entropy_is_that_of_the_softmax() -> None:
    logits = np.array([1.0, -2.0, 0.5, 900.0 - 899.0], np.float32)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    assert entropy(logits) == pytest.approx(-(p * np.log(p)).sum())
    assert entropy(np.full(8, 1e4, np.float32)) == pytest.approx(math.log(8))
