"""Sampling as it is defined, in float64 NumPy, one row at a time: what the device's sampler is compared with."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ragjax.core import Sampling, Tokens
from ragjax.runner import stages
from ragjax.runner.sampling import arrays_of
from ragjax.schedule.sampling import Sampler

NEAR = 2e-5
"""Logarithm of a weight, and mass of a nucleus, within which float32 may tell two the other way round."""

WIDTH = 100
"""Of all vocabularies on the device, which are filled up by impossible tokens: one program serves them."""


class Reference:
    """Says which tokens are chosen for one request.

    prompt: its tokens, int32 [n]; the repetition penalty counts them.
    """

    def __init__(self, sampling: Sampling, prompt: Tokens | None = None):
        self._sampling = sampling
        self._chosen: Counter[int] = Counter()
        self._prompt = frozenset(() if prompt is None or sampling.repetition_penalty == 1.0 else prompt.tolist())
        self._random = np.random.default_rng(sampling.seed)

    def accepts(self, logits_V: NDArray[np.float32], token: int) -> bool:
        """Whether the next token of float32 logits [V] is this one; penalties count it from then on."""
        key = int(self._random.integers(0, 2**64, dtype=np.uint64)) if self._sampling.temperature > 0 else 0
        found = near(self.penalized(logits_V), self._sampling, key, token)
        self._chosen[token] += 1
        return found

    def penalized(self, logits_V: NDArray[np.float32]) -> NDArray[np.floating]:
        """The logits with bias and penalties, float64 [V]."""
        asked = self._sampling
        out_V = logits_V.astype(np.float64)
        seen = np.array(sorted(self._prompt | self._chosen.keys()), np.intp)
        if asked.repetition_penalty != 1.0:
            x = out_V[seen]
            out_V[seen] = np.where(x > 0, x / asked.repetition_penalty, x * asked.repetition_penalty)
        for token, bias in asked.logit_bias.items():
            out_V[token] += bias
        for token, count in self._chosen.items():
            out_V[token] -= asked.presence_penalty + count * asked.frequency_penalty
        return out_V


def noise(key: int, token: int) -> float:
    """Gumbel noise of a token in a draw."""

    def mixed(bits: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ bits >> shift) * factor % 2**32
        return bits ^ bits >> 16

    bits = mixed(mixed(token * 0x9E3779B9 % 2**32 ^ key % 2**32) ^ key >> 32)
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24)))


def drawn(logits_V: NDArray[np.floating], sampling: Sampling, key: int) -> set[int]:
    """The token that is drawn, and those that rounding may take for it."""
    if sampling.temperature == 0.0:
        return {int(np.argmax(logits_V))}
    kept, weights = distribution(logits_V, sampling)
    possible = weights > 1e-30
    kept, weights = kept[possible], weights[possible]
    noisy = np.log(weights) + [noise(key, int(token)) for token in kept]
    return set(kept[noisy > noisy.max() - NEAR].tolist())


def near(logits_V: NDArray[np.floating], asked: Sampling, key: int, token: int) -> bool:
    """Whether the token is the definition's, or one that rounding may take for it."""
    found = drawn(logits_V, asked, key)
    if asked.temperature and asked.top_p < 1:
        for p in (asked.top_p - NEAR, asked.top_p + NEAR):
            cut = Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=min(max(p, 1e-9), 1.0))
            found |= drawn(logits_V, cut, key)
    return token in found


def distribution(logits_V: NDArray[np.floating], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Tokens that may be drawn, in the order of ids, and the probability of each."""
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the likeliest -inf, which is right
        scaled_V = (logits_V.astype(np.float64) - logits_V.max()) / sampling.temperature
    kept, weights = np.arange(len(scaled_V)), np.exp(scaled_V)
    if sampling.top_k:
        kept = np.sort(np.argsort(-scaled_V, kind="stable")[: sampling.top_k])
    weights = weights[kept] / weights[kept].sum()
    if sampling.top_p < 1.0:
        ranked = np.argsort(-weights, kind="stable")
        # the nucleus: the smallest set whose mass reaches top_p
        size = int(np.searchsorted(np.cumsum(weights[ranked]), sampling.top_p * (1 - 1e-6))) + 1
        nucleus = np.sort(ranked[:size])
        kept, weights = kept[nucleus], weights[nucleus] / weights[nucleus].sum()
    return kept, weights


@cache
def _program() -> Any:
    return jax.jit(stages.sample)


class OnDevice:
    """Chooses tokens for one request as the engine does: the device draws, told by the request's sampler."""

    def __init__(self, sampling: Sampling, prompt: Tokens | None = None):
        self._sampler = Sampler(sampling, prompt)
        self.said: list[int] = []

    def choose(self, logits_V: NDArray[np.float32]) -> int:
        """The next token of float32 logits [V]."""
        return self.many(logits_V, 1)[0]

    def many(self, logits_V: NDArray[np.float32], n: int) -> list[int]:
        """The next n tokens, all of the same logits, as if those before each were proposed and accepted."""
        draws = self._sampler.draws(self.said, [0] * (n - 1))
        padded_V = np.pad(np.asarray(logits_V, np.float32), (0, WIDTH - len(logits_V)), constant_values=-np.inf)
        logits_NV = np.tile(padded_V, (n, 1))
        self.said += np.asarray(_program()(logits_NV, *arrays_of(draws, *logits_NV.shape))).tolist()
        return self.said[-n:]
