"""Logits that stay on the device, and tokens that are chosen there: what crosses to the host are token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from ragjax.core import Adjusted, Chosen, Draw, Grid
from ragjax.runner.programs import Programs

ADJUSTED = (64, 1024, 4096, 16384, 65536, 2**18, 2**20)
"""Tokens of a row whose logits can be adjusted, by program. Each is compiled at its first use."""

LEAST_TEMPERATURE = 1e-30
"""Of rows that are drawn; all but the likeliest tokens have no weight below it in any case."""

NOTHING = Adjusted(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(frozen=True)
class Logits:
    """Next-token logits of some rows on the device, in parts: how many rows are of use, and float32 [N, V]."""

    parts: tuple[tuple[int, jax.Array], ...]

    def read(self, wanted: Sequence[bool] | None = None) -> dict[int, NDArray[np.float32]]:
        """Copy the wanted logits (None: all) to the host, by number, float32 [V] each. Waits for them."""
        found = {}
        for begin, size, logits_NV in self.placed():
            numbers = [i for i in range(begin, begin + size) if wanted is None or wanted[i]]
            if numbers:
                read_NV = np.asarray(logits_NV)
                found.update({i: read_NV[i - begin] for i in numbers})
        return found

    def placed(self) -> Iterator[tuple[int, int, jax.Array]]:
        begin = 0
        for size, logits_NV in self.parts:
            yield begin, size, logits_NV
            begin += size


@dataclass(frozen=True)
class Sampled:
    """Tokens that the device is choosing, in parts: how many are of use, ids [N], and log-probabilities if wanted."""

    parts: tuple[tuple[int, jax.Array, tuple[jax.Array, jax.Array, jax.Array] | None], ...]

    def read(self) -> list[Chosen]:
        found: list[Chosen] = []
        for size, token_N, logprobs in self.parts:
            tokens = np.asarray(token_N)[:size].tolist()
            if logprobs is None:
                found += [Chosen(token) for token in tokens]
                continue
            logprob_N, id_NY, top_NY = (np.asarray(x)[:size].tolist() for x in logprobs)
            pairs = (tuple(zip(*row, strict=True)) for row in zip(id_NY, top_NY, strict=True))
            found += [Chosen(*one) for one in zip(tokens, logprob_N, pairs, strict=True)]
        return found


def sample(programs: Programs, logits: Logits, draws: Sequence[Draw]) -> Sampled:
    parts = []
    for begin, size, logits_NV in logits.placed():
        part = draws[begin : begin + size]
        arrays = arrays_of(part, *logits_NV.shape)
        n, adjusted = arrays[-1].shape
        allowed_NV = logits_NV
        if any(draw.allowed is not None for draw in part):
            allowed_NV = programs.get("allow", n)(logits_NV, bits_of(part, *logits_NV.shape))
        token_N = programs.get("sample", n, adjusted)(allowed_NV, *arrays)
        logprobs = None
        if any(draw.logprobs for draw in part):
            logprobs = programs.get("logprobs", n)(logits_NV, token_N)
        for x in (token_N, *(logprobs or ())):
            x.copy_to_host_async()
        parts.append((size, token_N, logprobs))
    return Sampled(tuple(parts))


def bits_of(draws: Sequence[Draw], rows: int, vocabulary: int) -> NDArray[np.uint32]:
    """Bit masks of the tokens that each row may choose (`kernels.sampling.allow`), uint32 [rows, W]."""
    bits_NW = np.full((rows, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32)
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            bits_NW[row] = 0
            bits_NW[row, : len(draw.allowed)] = draw.allowed
    return bits_NW


def arrays_of(draws: Sequence[Draw], rows: int, vocabulary: int) -> tuple[NDArray[np.generic], ...]:
    """Host arrays of the program "sample" besides logits [rows, vocabulary] (`kernels.sampling.choose`, `adjust`).

    Rows of padding take the likeliest token.
    """
    padded = [*draws, *[Draw()] * (rows - len(draws))]
    changes = [draw.adjusted or NOTHING for draw in padded]
    most = max(len(one.token_A) for one in changes)
    size = Grid.fit(ADJUSTED, most) if most else 0
    token_NA = np.full((rows, size), vocabulary, np.int32)
    factor_NA, add_NA = np.ones((rows, size), np.float32), np.zeros((rows, size), np.float32)
    for row, one in enumerate(changes):
        at = row, slice(len(one.token_A))
        token_NA[at], factor_NA[at], add_NA[at] = one.token_A, one.factor_A, one.add_A
    temperatures = [max(draw.temperature, LEAST_TEMPERATURE) if draw.temperature else 0.0 for draw in padded]
    return (
        np.array(temperatures, np.float32),
        np.array([min(draw.top_k, vocabulary) for draw in padded], np.int32),
        np.array([draw.top_p for draw in padded], np.float32),
        np.array([draw.key for draw in padded], "<u8").view("<u4").reshape(-1, 2),
        token_NA,
        factor_NA,
        add_NA,
    )
