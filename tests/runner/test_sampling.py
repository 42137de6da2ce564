"""Tokens chosen by the runner's programs, for any number of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragjax.core import Adjusted, Draw, Sampling
from ragjax.runner.runner import Runner
from tests.support import sampler as oracle
from tests.support.devices import assert_agreement
from tests.support.steps import CONFIG, make_runner, step_of, tokens_of, whole

ROWS = 20


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner(CONFIG)


def adjusted(random: np.random.Generator, size: int) -> Adjusted | None:
    if not size:
        return None
    token_A = random.permutation(CONFIG.vocab_size)[:size].astype(np.int32)
    add_A = random.uniform(-2, 2, len(token_A)).astype(np.float32)
    return Adjusted(token_A, np.full(len(token_A), 1.3, np.float32), add_A)


def changed(logits_V: np.ndarray, by: Adjusted | None) -> np.ndarray:
    out_V = logits_V.astype(np.float64)
    if by is not None:
        x = out_V[by.token_A]
        out_V[by.token_A] = np.where(x > 0, x / by.factor_A, x * by.factor_A) + by.add_A
    return out_V


@pytest.mark.parametrize("uploaded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_row_is_drawn_as_it_asks(runner: Runner, seed: int, uploaded: bool) -> None:
    """More rows than a bucket holds, in any order; with lists of every length, or none; log-probabilities for some."""
    random = np.random.default_rng(seed)
    order = random.permutation(ROWS)
    logits = runner.predict(runner.step(step_of([whole(tokens_of(22, ROWS), 2)], 24)), order.tolist())
    logits_NV = np.stack(list(logits.read().values()))
    assert len(logits.parts) > 1
    draws = [
        Draw(
            temperature=float(random.choice([0.0, 0.6, 1.0])),
            top_k=int(random.choice([0, 3, 10**6])),
            top_p=float(random.choice([0.7, 1.0])),
            key=int(random.integers(0, 2**64, dtype=np.uint64)),
            adjusted=adjusted(random, int(random.choice([0, 0, 5, CONFIG.vocab_size]))),
            logprobs=bool(random.random() < 0.2),
        )
        for _ in range(ROWS)
    ]
    found = runner.sample(runner.upload_logits(list(logits_NV)) if uploaded else logits, draws).read()
    assert len(found) == ROWS
    for draw, one, logits_V in zip(draws, found, logits_NV, strict=True):
        asked = Sampling(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p)
        assert oracle.near(changed(logits_V, draw.adjusted), asked, draw.key, one.token)
        log_V = logits_V.astype(np.float64) - np.logaddexp.reduce(logits_V.astype(np.float64))
        assert one.logprob is not None or not draw.logprobs
        if one.logprob is not None:
            assert one.logprob == pytest.approx(log_V[one.token], abs=1e-5)
            assert [token for token, _ in one.top] == np.argsort(-log_V, kind="stable")[:20].tolist()
            assert [value for _, value in one.top] == pytest.approx(np.sort(log_V)[::-1][:20].tolist(), abs=1e-5)


def test_only_the_logits_that_are_wanted_are_fetched(runner: Runner) -> None:
    logits = runner.predict(runner.step(step_of([whole(tokens_of(22, ROWS), 2)], 24)), range(ROWS))
    wanted = [row in (0, 13) for row in range(ROWS)]
    every, some = logits.read(), logits.read(wanted)
    assert list(some) == [0, 13] and list(every) == [*range(ROWS)]
    assert all(np.array_equal(some[row], every[row]) for row in some)
    assert logits.read([False] * ROWS) == {}


SHARDED = """
import jax
from dataclasses import replace
from ragjax.core import Draw
from ragjax.runner.mesh import mesh_of
from tests.support import steps as t

config = replace(t.CONFIG, num_layers=2, num_heads=16, num_kv_heads=8)
found = []
for devices in (1, 8):
    mesh = mesh_of(jax.devices()[:devices])
    made = t.make_runner(config, mesh=mesh)
    logits = made.predict(made.step(t.step_of([t.whole(t.tokens_of(3, 8), 1)], 24)), range(8))
    draws = [Draw(0.8, 5, 0.9, i << 61 | i, logprobs=True) for i in range(8)]
    found.append([one.token for one in made.sample(logits, draws).read()])
    found.append([one.token for one in made.sample(made.upload_logits(list(logits.read().values())), draws).read()])
assert all(tokens == found[0] for tokens in found), found
print("agree on", jax.device_count(), "devices")
"""


@pytest.mark.slow
def test_a_mesh_chooses_the_same_tokens() -> None:
    assert_agreement(SHARDED, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_tokens_that_are_allowed_are_chosen(runner: Runner, temperature: float) -> None:
    """Some rows name a few tokens, others none; log-probabilities stay the model's; a word not given allows none."""
    random = np.random.default_rng(3)
    logits_NV = random.normal(size=(ROWS, CONFIG.vocab_size)).astype(np.float32)
    draws, allowed = [], []
    for row in range(ROWS):
        tokens = np.sort(random.choice(CONFIG.vocab_size, 3, replace=False)) if row % 2 else None
        bits = None
        if tokens is not None:
            bits = np.zeros(tokens[-1] // 32 + 1, np.uint32)
            np.bitwise_or.at(bits, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        allowed.append(tokens)
        draws.append(Draw(temperature, key=int(random.integers(2**63)), logprobs=row == 1, allowed=bits))
    found = runner.sample(runner.upload_logits(list(logits_NV)), draws).read()
    free = [replace(draw, allowed=None) for draw in draws]
    unbound = runner.sample(runner.upload_logits(list(logits_NV)), free).read()
    for row, (one, tokens) in enumerate(zip(found, allowed, strict=True)):
        if tokens is None:
            assert one.token == unbound[row].token
        else:
            assert one.token in tokens
            assert temperature or one.token == tokens[np.argmax(logits_NV[row, tokens])]
    whole = logits_NV[1].astype(np.float64)
    assert found[1].logprob == pytest.approx(whole[found[1].token] - np.logaddexp.reduce(whole), abs=1e-5)
