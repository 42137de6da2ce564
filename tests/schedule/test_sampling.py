"""Sampling by the device against known distributions, and what it is told for each token."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import RequestError, Sampling
from ragjax.schedule.sampling import Sampler
from tests.support import sampler as oracle
from tests.support.sampler import OnDevice

PROBABILITIES = {3: 0.4, 0: 0.25, 5: 0.15, 1: 0.1, 4: 0.06, 2: 0.04}


def known_logits(shift=0.0):
    return np.log([PROBABILITIES[i] for i in range(6)]).astype(np.float32) + np.float32(shift)


# ---------------------------------------------------------------------------------------- sampling


def test_temperature_zero_takes_the_likeliest():
    sampler = OnDevice(Sampling(temperature=0.0, top_k=2, top_p=0.5))
    assert {sampler.choose(known_logits()) for _ in range(20)} == {3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-307, 1e-308, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_the_least_temperature_takes_the_likeliest(temperature, options):
    sampler = OnDevice(Sampling(temperature=temperature, **options))
    assert {sampler.choose(known_logits(50.0)) for _ in range(20)} == {3}


def test_the_least_temperature_draws_among_equals():
    logits = np.array([0.0, 1.0, 1.0, 0.999], np.float32)
    assert set(OnDevice(Sampling(temperature=1e-300, seed=0)).many(logits, 100)) == {1, 2}


def test_a_seed_repeats_and_another_differs():
    def draws(seed):
        sampler = OnDevice(Sampling(temperature=1.0, seed=seed))
        return [sampler.choose(known_logits()) for _ in range(64)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)


def reference(temperature, top_k, top_p):
    """Probability of each candidate: temperature, then top-k, then the nucleus."""
    weights = {token: p ** (1 / temperature) for token, p in PROBABILITIES.items()}
    ranked = sorted(weights, key=weights.get, reverse=True)[: top_k or None]
    total = sum(weights[token] for token in ranked)
    nucleus, score = [], 0.0
    for token in ranked:
        nucleus.append(token)
        score += weights[token] / total
        if score >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return {token: weights[token] / total for token in nucleus}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "candidates"),
    [
        (1.0, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (2.0, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (0.5, 0, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 6, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 100, 1.0, {0, 1, 2, 3, 4, 5}),
        (1.0, 3, 1.0, {3, 0, 5}),
        (1.0, 1, 1.0, {3}),
        (1.0, 0, 1e-9, {3}),
        (1.0, 0, 0.39, {3}),
        (1.0, 0, 0.41, {3, 0}),
        (1.0, 0, 0.64, {3, 0}),
        (1.0, 0, 0.66, {3, 0, 5}),
        (1.0, 0, 0.97, {0, 1, 2, 3, 4, 5}),
        (1.0, 3, 0.7, {3, 0}),  # of what top-k left; the nucleus of all would have three
        (0.5, 0, 0.78, {3, 0}),  # of what the temperature sharpened; three without it
    ],
)
def test_frequencies_are_those_of_the_truncated_distribution(temperature, top_k, top_p, candidates):
    expected = reference(temperature, top_k, top_p)
    assert set(expected) == candidates
    sampler = OnDevice(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=3))
    n = 3000
    draws = sampler.many(known_logits(shift=50.0), n)
    assert set(draws) == candidates
    for token, p in expected.items():
        assert abs(draws.count(token) / n - p) <= 5 * math.sqrt(p * (1 - p) / n), token


def test_equal_logits_still_leave_exactly_k():
    sampler = OnDevice(Sampling(temperature=1.0, top_k=3, seed=0))
    assert len(set(sampler.many(np.zeros(50, np.float32), 300))) == 3


def test_equal_weights_still_leave_the_smallest_nucleus():
    sampler = OnDevice(Sampling(temperature=1.0, top_p=0.55, seed=0))
    assert len(set(sampler.many(np.zeros(4, np.float32), 300))) == 3


def test_impossible_tokens_are_never_chosen():
    logits = np.full(8, -np.inf, np.float32)
    logits[[2, 6]] = 1.0, 0.0
    sampler = OnDevice(Sampling(temperature=2.0, seed=0))
    assert set(sampler.many(logits, 300)) == {2, 6}


def test_choosing_leaves_the_logits_alone():
    logits = known_logits()
    OnDevice(Sampling(temperature=0.3, top_k=2, top_p=0.9, seed=0)).choose(logits)
    assert np.array_equal(logits, known_logits())


# ------------------------------------------------------------------------------ bias and penalties


def penalized(logits, prompt, said, bias, presence, frequency, repetition):
    """The published formulas, one token at a time."""
    found = []
    for token, logit in enumerate(float(x) for x in logits):
        if token in prompt or token in said:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = list(said).count(token)
        found.append(logit + bias.get(token, 0.0) - count * frequency - (count > 0) * presence)
    return found


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=4),
    st.sampled_from([0.0, 0.4, 2.0, -2.0]),
    st.sampled_from([0.0, 0.3, 2.0, -2.0]),
    st.sampled_from([1.0, 1.3, 3.0, 0.5]),
)
def test_bias_and_penalties_are_their_formulas(seed, bias, presence, frequency, repetition):
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 12, 4).astype(np.int32)
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    greedy = OnDevice(Sampling(logit_bias=bias, **penalties), prompt)
    drawn = OnDevice(Sampling(logit_bias=bias, temperature=0.7, top_p=0.9, seed=seed, **penalties), prompt)
    plain = OnDevice(Sampling(temperature=0.7, top_p=0.9, seed=seed))
    said, drawn_said = [], []
    for _ in range(8):
        logits = random.standard_normal(12).astype(np.float32)
        expected = penalized(logits, prompt, said, bias, presence, frequency, repetition)
        said.append(greedy.choose(logits))
        assert said[-1] == int(np.argmax(expected))
        expected = penalized(logits, prompt, drawn_said, bias, presence, frequency, repetition)
        drawn_said.append(drawn.choose(logits))
        assert drawn_said[-1] == plain.choose(np.array(expected))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.5, 1.3]),
    st.sampled_from([0, 3, 60]),
    st.sampled_from([0.6, 0.95, 1.0]),
)
def test_all_together_are_the_definition(seed, temperature, top_k, top_p):
    random = np.random.default_rng(seed)
    asked = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        logit_bias={1: 2.0, 70: -3.0, 99: 1.5},
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
    )
    prompt = random.integers(0, 100, 70).astype(np.int32)
    device, reference = OnDevice(asked, prompt), oracle.Reference(asked, prompt)
    for _ in range(8):
        logits = (random.standard_normal(100) * 2).astype(np.float32)
        assert reference.accepts(logits, device.choose(logits))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
    ],
)
def test_a_bad_value_names_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value})
    assert caught.value.param == field


# --------------------------------------------------------------------------------- random numbers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_each_token_has_a_key_of_its_own(seed, proposed):
    """However many tokens are proposed in each step, number i of the stream is that of token i."""
    sampler, said = Sampler(Sampling(temperature=1.0, seed=seed)), []
    expected = np.random.default_rng(seed).integers(0, 2**64, 200, np.uint64)
    for n in proposed:
        draws = sampler.draws(said, range(n))
        assert [draw.key for draw in draws] == expected[len(said) : len(said) + n + 1].tolist()
        said += range(1 + n // 2)  # some are accepted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_penalties_of_proposed_tokens_are_those_of_generated_ones(seed, sizes):
    random = np.random.default_rng(seed)
    asked = Sampling(logit_bias={3: 5.0, 9: -2.0}, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    prompt = random.integers(0, 12, 5).astype(np.int32)
    sampler, said = Sampler(asked, prompt), []
    for size in sizes:
        tokens = random.integers(0, 12, size).tolist()
        for i, draw in enumerate(sampler.draws(said, tokens)):
            (fresh,) = Sampler(asked, prompt).draws([*said, *tokens[:i]])
            by_token = [
                dict(zip(a.token_A.tolist(), zip(a.factor_A.tolist(), a.add_A.tolist(), strict=True), strict=True))
                for a in (draw.adjusted, fresh.adjusted)
            ]
            assert by_token[0] == by_token[1]
        said += [*tokens[: size // 2], int(random.integers(0, 12))]


def test_nothing_is_adjusted_unless_asked_for():
    (draw,) = Sampler(Sampling(temperature=0.5)).draws([1, 2])
    assert draw.adjusted is None and not draw.logprobs


@pytest.mark.parametrize("extreme", [1e-300, 1e300])
def test_the_repetition_penalty_leaves_logits_finite(extreme):
    (draw,) = Sampler(Sampling(repetition_penalty=extreme), np.array([1], np.int32)).draws([])
    assert np.isfinite(np.float32(50.0) / draw.adjusted.factor_A).all()
    assert np.isfinite(np.float32(-50.0) * draw.adjusted.factor_A).all()
