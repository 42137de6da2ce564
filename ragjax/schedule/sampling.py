"""Settings of the device's sampler (`kernels/sampling.py`) for each row of a request's logits.

Sampling order is the usual one: repetition penalty (CTRL, arXiv 1909.05858), logit bias, presence and frequency
penalties (OpenAI's API reference), temperature, then top-k, then top-p (nucleus, arXiv 1904.09751). Log-probabilities
are those of the model (temperature 1, nothing cut), as OpenAI's API reports them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ragjax.core import Adjusted, Draw, Sampling, Tokens
from ragjax.schedule.grammar import Constraint

LEAST_FACTOR, MOST_FACTOR = 1e-30, 1e30
"""Bounds of the repetition penalty on the device: logits stay finite in float32."""


class Sampler:
    """Says how the tokens of one request are chosen.

    Each generated token has a key of its own, the i-th number of the seed's stream for token i. So the tokens do not
    depend on which steps compute them: with proposed tokens or without, before a restart or after.

    prompt: its tokens, int32 [n]; the repetition penalty counts them. constraint: says which tokens may be chosen
    (None: all may).
    """

    def __init__(self, sampling: Sampling, prompt: Tokens | None = None, constraint: Constraint | None = None):
        self._sampling = sampling
        self.constraint = constraint
        self._stream = np.random.default_rng(sampling.seed)
        self._keys: list[int] = []
        self._changes = _Changes(sampling, prompt)

    @property
    def notices(self) -> tuple[str, ...]:
        return () if self.constraint is None or not self.constraint.failure else (self.constraint.failure,)

    def draws(self, said: Sequence[int], proposed: Sequence[int] = ()) -> list[Draw]:
        """Settings for the next token, and for those behind it if the proposed tokens are accepted.

        said: all tokens generated so far; those of the last call are the first of them.
        """
        self._changes.count(said)
        found, changes = [self._draw(len(said), self._changes)], self._changes
        for i, token in enumerate(proposed, 1):
            if changes.counts:
                changes = changes.copy()
                changes.add(int(token))
            found.append(self._draw(len(said) + i, changes))
        if self.constraint is None:
            return found
        masks = self.constraint.masks(said, proposed)
        return [replace(draw, allowed=mask) for draw, mask in zip(found, masks, strict=True)]

    def _draw(self, number: int, changes: _Changes) -> Draw:
        asked = self._sampling
        logprobs, adjusted = asked.logprobs is not None, changes.now()
        if asked.temperature == 0.0:
            return Draw(adjusted=adjusted, logprobs=logprobs)
        missing = max(0, number + 1 - len(self._keys))
        self._keys += self._stream.integers(0, 2**64, missing, np.uint64).tolist()
        return Draw(asked.temperature, asked.top_k, asked.top_p, self._keys[number], adjusted, logprobs)


class _Changes:
    """Bias and penalties of one request, by token. counts: whether they depend on what is generated."""

    def __init__(self, sampling: Sampling, prompt: Tokens | None):
        self._sampling = sampling
        repeats = sampling.repetition_penalty != 1.0
        self.counts = bool(repeats or sampling.presence_penalty or sampling.frequency_penalty)
        seen = set(prompt.tolist()) if repeats and prompt is not None else set()
        tokens = sorted(seen | sampling.logit_bias.keys())
        self._place = {token: place for place, token in enumerate(tokens)}
        self._token_A = np.array(tokens, np.int32)
        self._bias_A = np.array([sampling.logit_bias.get(token, 0.0) for token in tokens], np.float64)
        self._seen_A = np.array([token in seen for token in tokens], bool)
        self._count_A = np.zeros(len(tokens), np.int64)
        self._counted = 0

    def copy(self) -> _Changes:
        other = copy.copy(self)
        other._place = dict(self._place)
        other._seen_A, other._count_A = self._seen_A.copy(), self._count_A.copy()
        return other

    def count(self, said: Sequence[int]) -> None:
        if self.counts:
            for token in said[self._counted :]:
                self.add(token)

    def add(self, token: int) -> None:
        self._counted += 1
        if token not in self._place:
            self._place[token] = len(self._token_A)
            self._token_A = np.append(self._token_A, np.int32(token))
            self._bias_A = np.append(self._bias_A, 0.0)
            self._seen_A = np.append(self._seen_A, True)
            self._count_A = np.append(self._count_A, 0)
        self._seen_A[self._place[token]] = True
        self._count_A[self._place[token]] += 1

    def now(self) -> Adjusted | None:
        if not len(self._token_A):
            return None
        asked = self._sampling
        repetition = min(max(asked.repetition_penalty, LEAST_FACTOR), MOST_FACTOR)
        penalty_A = asked.presence_penalty * (self._count_A > 0) + asked.frequency_penalty * self._count_A
        return Adjusted(
            self._token_A,
            np.where(self._seen_A, repetition, 1.0).astype(np.float32),
            (self._bias_A - penalty_A).astype(np.float32),
        )
