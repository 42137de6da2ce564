"""Signals: what one pass of the question, and the prompt's layout, tell of each chunk token.

Each signal is a share: not negative, and 1 over all tokens that may be recomputed (0 everywhere if there is nothing of
it). Shares of different signals, prompts and models can be added and compared. One pass gives them all: attention that
a token receives from the question's rows, plain and times the norm of its value, in every layer (heads averaged).

- `attention-1` to `attention-4`: plain attention over the first to last quarter of the layers; `attention-last` of the
  last layer (FusionRAG, section 3.2), `attention-even` with the same weight for every layer (ProphetKV).
- `received-1` to `received-4`: attention times value norm over a quarter (`ragjax`: the later two quarters);
  `received-root` the square root over all layers, which is flatter.
- `nearby`: what the tokens around a token receive, its own left out; `chunk`: what its chunk receives, the same for all
  tokens of the chunk.
- `start`: 1 / (1 + place in the chunk) (EPIC); `received-start`: the same times what the token receives in all layers.
- `place`: the same for all, so that a token counts by itself.
- `isolated`: the same for all tokens of chunks whose KV was computed behind the system prompt alone, 0 for others.
- `drift`: how far preprocessing moved the token's values (`notes.py`). `received-drift`, `late-drift`, `even-drift`,
  `last-drift`: the same times what is received from the token in all layers and in the later half of them, times
  `attention-even`, and times `attention-last`. A token of whose chunk nothing is noted has the mean of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.tree import Provenance
from ragjax.core import Kind, Measure, Results, Tokens
from ragjax.reuse.base import segments_of
from ragjax.reuse.notes import notes_of
from ragjax.reuse.select import shares
from ragjax.reuse.stitch import Stitched

QUARTERS = 4
"""Parts of the depth that have signals of their own."""

NEAR = 4
"""Tokens on each side that count as near."""

MEASURES = frozenset({Measure.KEY_SCORE, Measure.VALUED_SCORE})
"""What the pass measures."""

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Signals:
    """Signals of the tokens that may be recomputed.

    tokens: their indexes in the prompt, int32 [n], ascending. share_SN: in the order of `NAMES`, float64. mass: share
    of a question row's attention that goes to them all, the mean over rows, layers and heads.
    """

    tokens: Tokens
    share_SN: Shares
    mass: float

    def covered(self, chosen: Tokens) -> Shares:
        """The part of each signal that these tokens (indexes) have, float64 [signals]."""
        part: Shares = self.share_SN[:, np.isin(self.tokens, chosen)].sum(1)
        return part


def signals(stitched: Stitched, results: Results, tokens: Tokens) -> Signals:
    """Signals of some chunk tokens (indexes, ascending), from a pass that measured `MEASURES` in all layers."""
    plain_LN = np.asarray(results[Measure.KEY_SCORE][:, tokens], np.float64)
    valued_LN = np.asarray(results[Measure.VALUED_SCORE][:, tokens], np.float64)
    whole, even = valued_LN.sum(0), shares(plain_LN).sum(0)
    chunk_N, place_N, alone_N = _layout(stitched, tokens)
    drift_N = _drift(stitched, tokens)
    named = {
        **{f"attention-{i + 1}": part.sum(0) for i, part in enumerate(_quarters(plain_LN))},
        **{f"received-{i + 1}": part.sum(0) for i, part in enumerate(_quarters(valued_LN))},
        "attention-last": plain_LN[-1],
        "attention-even": even,
        "received-root": np.sqrt(whole),
        "nearby": _nearby(whole, chunk_N),
        "chunk": _spread(whole, chunk_N),
        "start": 1.0 / (1.0 + place_N),
        "received-start": whole / (1.0 + place_N),
        "place": np.ones(len(tokens)),
        "isolated": alone_N.astype(np.float64),
        "drift": drift_N,
        "received-drift": whole * drift_N,
        "late-drift": valued_LN[len(valued_LN) // 2 :].sum(0) * drift_N,
        "even-drift": even * drift_N,
        "last-drift": plain_LN[-1] * drift_N,
    }
    mass = float(plain_LN.sum()) / (len(plain_LN) * len(stitched.question))
    return Signals(tokens, shares(np.stack([named[name] for name in NAMES])), mass)


NAMES = (
    *(f"attention-{i + 1}" for i in range(QUARTERS)),
    *(f"received-{i + 1}" for i in range(QUARTERS)),
    *(
        "attention-last",
        "attention-even",
        "received-root",
        "nearby",
        "chunk",
        "start",
        "received-start",
        "place",
        "isolated",
        "drift",
        "received-drift",
        "late-drift",
        "even-drift",
        "last-drift",
    ),
)
"""Every signal, in order."""


def _quarters(score_LN: Shares) -> Sequence[Shares]:
    """Consecutive parts of the layers; those of few layers share some."""
    depth = len(score_LN)
    cuts = [
        (i * depth // QUARTERS, max((i + 1) * depth // QUARTERS, i * depth // QUARTERS + 1)) for i in range(QUARTERS)
    ]
    return [score_LN[begin:end] for begin, end in cuts]


def _layout(stitched: Stitched, tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Segment, place in the segment, and whether its KV is isolated, of each token."""
    prompt = stitched.prompt
    segment_N = np.searchsorted(np.asarray(prompt.starts), tokens, "right") - 1
    place_N = tokens - np.asarray(prompt.starts)[segment_N]
    alone = np.ones(len(prompt.segments), bool)
    for i in segments_of(prompt, Kind.CHUNK):
        match = stitched.matches.get(i)  # none: it was computed for this request, isolated
        alone[i] = match is None or match.node.provenance is Provenance.ISOLATED
    return segment_N.astype(np.int64), place_N.astype(np.int64), alone[segment_N]


def _drift(stitched: Stitched, tokens: Tokens) -> Shares:
    """Drift of each token; the mean of the others where none is noted, 1 if there are no others."""
    drift_N = np.full(len(stitched.prompt), np.nan)
    for i, meta in stitched.meta.items():
        notes = notes_of(meta)
        if notes is not None and i not in stitched.condensed:
            drift_N[slice(*stitched.prompt.bounds(i))] = notes.drift_N
    asked_N = drift_N[tokens]
    known = np.isfinite(asked_N)
    return np.where(known, asked_N, asked_N[known].mean() if known.any() else 1.0)


def _nearby(score_N: Shares, chunk_N: NDArray[np.int64]) -> Shares:
    """What up to `NEAR` tokens on each side have, of the same chunk."""
    found = np.zeros_like(score_N)
    for step in range(1, min(NEAR + 1, len(score_N))):
        same = chunk_N[step:] == chunk_N[:-step]
        found[step:] += np.where(same, score_N[:-step], 0.0)
        found[:-step] += np.where(same, score_N[step:], 0.0)
    return found


def _spread(score_N: Shares, chunk_N: NDArray[np.int64]) -> Shares:
    """The mean over each token's chunk."""
    _, at_N = np.unique(chunk_N, return_inverse=True)
    total, count = np.bincount(at_N, score_N), np.bincount(at_N)
    mean: Shares = (total / np.maximum(count, 1))[at_N]
    return mean
