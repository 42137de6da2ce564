"""The device's sampler against its definition in NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragjax.core import Sampling
from ragjax.kernels import sampling
from tests.support import sampler as oracle
from tests.support.matrix import few


@cache
def jitted(name: str) -> Any:
    return jax.jit(getattr(sampling, name))


def chosen(logits_NV: NDArray[np.float32], asked: list[Sampling], keys: list[int]) -> list[int]:
    arrays = (
        np.array([max(one.temperature, 1e-30 * (one.temperature > 0)) for one in asked], np.float32),
        np.array([one.top_k for one in asked], np.int32),
        np.array([one.top_p for one in asked], np.float32),
        np.array(keys, "<u8").view("<u4").reshape(-1, 2),
    )
    return [int(token) for token in np.asarray(jitted("choose")(logits_NV, *arrays))]


KINDS = ("normal", "flat", "steps", "impossible", "sharp", "zeros", "huge")


def logits_of(kind: str, size: int, random: np.random.Generator) -> NDArray[np.float32]:
    x = random.standard_normal(size)
    if kind == "flat":
        x = np.full(size, 1.5)
    elif kind == "steps":  # many ties
        x = random.integers(-3, 3, size).astype(float)
    elif kind == "impossible":
        x[random.random(size) < 0.9] = -np.inf
        x[random.integers(size)] = 0.5
    elif kind == "sharp":
        x *= 200
    elif kind == "zeros":  # of both signs, which are equal
        x = np.where(random.random(size) < 0.5, 0.0, -0.0)
    elif kind == "huge":
        x = x + 3e4
    return x.astype(np.float32)


asking = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 50, 700, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7, 1.0]),
)


@pytest.mark.smoke
@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(asking, st.sampled_from(KINDS), st.integers(0, 2**64 - 1)), min_size=4, max_size=4),
    st.sampled_from([7, 512, 1300]),
    st.integers(0, 2**32 - 1),
)
@example([(Sampling(temperature=0.5, top_p=0.5), kind, 2**64 - 1) for kind in KINDS[1:5]], 7, 0)
def test_it_is_the_definition(rows: list[tuple[Sampling, str, int]], size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits_NV = np.stack([logits_of(kind, size, random) for _, kind, _ in rows])
    asked, keys = [one for one, _, _ in rows], [key for _, _, key in rows]
    for row, token in enumerate(chosen(logits_NV, asked, keys)):
        assert oracle.near(logits_NV[row], asked[row], keys[row], token), (row, token)


def test_no_number_at_all_still_names_a_token() -> None:
    logits_NV = np.stack([np.full(600, x, np.float32) for x in (np.nan, -np.inf, np.inf, np.nan)])
    asked = [Sampling(temperature=t, top_k=5, top_p=0.5) for t in (0.0, 1.0, 1.0, 1.0)]
    assert all(0 <= token < 600 for token in chosen(logits_NV, asked, [5] * 4))


CUTS: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.8}, {"top_k": 300, "top_p": 0.95}]


@pytest.mark.slow
@pytest.mark.parametrize("options", few(CUTS, [{}, CUTS[-1]]))
def test_frequencies_are_those_of_the_distribution(options: dict[str, Any]) -> None:
    """Pearson's chi-square of many draws, beside its mean and deviation."""
    random, rows, rounds = np.random.default_rng(5), 64, 300
    keys = random.integers(0, 2**64, (rounds, rows), np.uint64)
    logits_V = (random.standard_normal(900) * 2).astype(np.float32)
    asked = Sampling(temperature=0.9, **options)
    counts = np.zeros(900)
    for of_round in keys.tolist():
        tokens = chosen(np.tile(logits_V, (rows, 1)), [asked] * rows, of_round)
        counts += np.bincount(tokens, minlength=900)
    kept, probability = oracle.distribution(logits_V, asked)
    assert counts.sum() == counts[kept].sum(), "a token that is cut was drawn"
    expected = probability * rows * rounds
    common = expected > 5
    squares = ((counts[kept] - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    assert abs(squares - freedom) < 5 * np.sqrt(2 * freedom)


def test_logits_that_differ_a_little_seldom_draw_another_token() -> None:
    random, rows = np.random.default_rng(6), 512
    logits_V = (random.standard_normal(900) * 3).astype(np.float32)
    keys, asked = random.integers(0, 2**64, rows, np.uint64).tolist(), [Sampling(temperature=1.0)] * rows
    first = chosen(np.tile(logits_V, (rows, 1)), asked, keys)
    other_NV = logits_V + random.normal(0, 0.05, (rows, 900)).astype(np.float32)
    changed = sum(a != b for a, b in zip(first, chosen(other_NV, asked, keys), strict=True))
    assert 0 < changed < 0.05 * rows, changed


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1.3, 0.5, 1e-300]))
def test_adjusted_logits_are_the_formulas(seed: int, repetition: float) -> None:
    random = np.random.default_rng(seed)
    logits_NV = np.stack([logits_of(kind, 40, random) for kind in ("normal", "impossible")])
    token_NA = np.stack([random.permutation(40)[:6] for _ in range(2)]).astype(np.int32)
    token_NA[0, 4:] = (40, 41)  # padding
    factor = max(repetition, 1e-30)
    factor_NA = np.where(random.random((2, 6)) < 0.5, factor, 1.0).astype(np.float32)
    add_NA = random.uniform(-100, 100, (2, 6)).astype(np.float32)
    expected = logits_NV.astype(np.float64)
    for row in range(2):
        for token, by, add in zip(token_NA[row], factor_NA[row].astype(float), add_NA[row], strict=True):
            if token < 40:
                x = expected[row, token]
                expected[row, token] = (x / by if x > 0 else x * by) + add
    found = np.asarray(jitted("adjust")(logits_NV, token_NA, factor_NA, add_NA))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["normal", "steps", "impossible", "huge", "sharp"]))
def test_logprobs_are_log_softmax(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    logits_NV = np.stack([logits_of(kind, 700, random) for _ in range(2)])
    token_N = np.array([int(random.integers(700)), int(logits_NV[1].argmax())], np.int32)
    logprob_N, id_NY, top_NY = (np.asarray(x) for x in jitted("logprobs")(logits_NV, token_N))
    x_NV = logits_NV.astype(np.float64)
    x_NV -= np.logaddexp.reduce(x_NV, axis=1, keepdims=True)
    np.testing.assert_allclose(logprob_N, x_NV[[0, 1], token_N], rtol=1e-6, atol=1e-5)
    for row in range(2):
        best = np.argsort(-x_NV[row], kind="stable")[:20]
        assert id_NY[row].tolist() == best.tolist()
        np.testing.assert_allclose(top_NY[row], x_NV[row, best], rtol=1e-6, atol=1e-5)
