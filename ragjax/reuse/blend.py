"""blend: recompute the tokens whose KV deviates most at the second layer (CacheBlend, arXiv 2405.16444).

As FusionRAG describes it (section 2.2.2, eqs. 7 to 9): full attention over all chunks through the first two layers, the
squared distance of its K from the reused one at the second layer (eq. 8 takes K or V), one top-k over the whole
context. Keys are compared at equal rotation. The slots of these two layers' KV are freed then, and the chosen tokens
are computed again from the first layer on.
"""

from __future__ import annotations

from ragjax.core import Measure, Pass, Prompt, Span
from ragjax.reuse.base import indices
from ragjax.reuse.repair import Choice, Selector, chunk_tokens, top
from ragjax.reuse.stitch import Stitched

PROBED = 2
"""Layers computed for all chunk tokens."""


class Deviation(Selector):
    """Tokens whose KV deviates most from full attention's at the second layer."""

    measures = frozenset({Measure.DEVIATION})
    early_end = PROBED

    def scratch(self, prompt: Prompt) -> int:
        return chunk_tokens(prompt)

    def choose(self, stitched: Stitched, count: int) -> Choice:
        chunks = stitched.chunks
        rows = indices(int(chunks[0]), int(chunks[-1]) + 1)
        spans = (*stitched.head, Span(chunks, stitched.scratch), *stitched.query)
        layers = (0, min(PROBED, stitched.stages[-1]))
        results = yield Pass(rows, rows, spans, self.measures, layers=layers, stale=stitched.chunk)
        key = results[Measure.DEVIATION][-1, chunks - rows[0]]
        return top(key, chunks, count)
