"""blend: recompute the tokens whose KV deviates most at the second layer (CacheBlend, arXiv 2405.16444).

As FusionRAG describes it (section 2.2.2, eqs. 7 to 9): full attention over all chunks through the first two layers, the
squared distance of its K or V from the reused one at the second layer, one top-k over the whole context. Eq. 8 takes
K or V; the default is K. Keys are compared at equal rotation. The slots of these two layers' KV are freed then, and
the chosen tokens are computed again from the first layer on.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Measure, Pass, Prompt, Span
from ragjax.reuse.base import indices
from ragjax.reuse.repair import Choice, Selector, chunk_tokens, top
from ragjax.reuse.stitch import Stitched

Of = Literal["key", "value", "both"]
"""The deviation that counts; both: the sum of the two, each divided by its mean."""

PROBED = 2
"""Layers computed for all chunk tokens."""


class Deviation(Selector):
    """Tokens whose KV deviates most from full attention's at the second layer."""

    measures = frozenset({Measure.DEVIATION})
    early_end = PROBED

    def __init__(self, of: Of = "key"):
        self._of: Of = of

    def scratch(self, prompt: Prompt) -> int:
        """All chunks."""
        return chunk_tokens(prompt)

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """One pass through two layers over everything from the first chunk to the last."""
        chunks = stitched.chunks
        rows = indices(int(chunks[0]), int(chunks[-1]) + 1)
        spans = (*stitched.head, Span(chunks, stitched.scratch), *stitched.query)
        layers = (0, min(PROBED, stitched.stages[-1]))
        results = yield Pass(rows, rows, spans, self.measures, layers=layers, stale=stitched.chunk)
        deviation = results[Measure.DEVIATION][:, -1, chunks - rows[0]]
        return top(combined(deviation, self._of), chunks, count)


def combined(deviation: NDArray[np.float32], of: Of) -> NDArray[np.float64]:
    """One score a token, float64 [n], from deviations of keys and values, [2, n]."""
    key: NDArray[np.float64]
    value: NDArray[np.float64]
    key, value = np.asarray(deviation, np.float64)
    if of != "both":
        return key if of == "key" else value
    return key / max(float(key.mean()), 1e-30) + value / max(float(value.mean()), 1e-30)
