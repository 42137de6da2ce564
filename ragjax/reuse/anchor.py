"""ragjax: the first chunk isolated, the others preprocessed; the tokens that move the question most are recomputed.

Ours, after FusionRAG (section 3) and the measurements in docs/log.md. A chunk right behind the system prompt sees in
full attention what it saw when it was computed alone: its isolated KV is exact there, so none of it is recomputed (the
anchor). The score of a token is the attention that the question pays to it, times the norm of its value, summed over
the later half of the sections and the question's rows, averaged over heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.match import Candidate
from ragjax.cache.tree import Provenance
from ragjax.core import Measure, Prompt, Tokens
from ragjax.core.passes import sections
from ragjax.reuse.base import indices
from ragjax.reuse.fusion import Fused
from ragjax.reuse.head import system_length
from ragjax.reuse.repair import Choice, Selector, top
from ragjax.reuse.stitch import Stitched


class Anchored(Fused):
    """Preprocessed chunks; the one right behind the system prompt is isolated if the cache has it so."""

    leads = False  # an answer is the same whatever ran before

    def candidates(self, prompt: Prompt, i: int) -> Iterator[Candidate]:
        if prompt.starts[i] == system_length(prompt):
            yield Candidate(Provenance.ISOLATED, self.method)
        yield from super().candidates(prompt, i)


class Valued(Selector):
    """Tokens from which the question receives most over the later layers; none of the anchor's."""

    measures = frozenset({Measure.VALUED_SCORE})

    def choose(self, stitched: Stitched, count: int) -> Choice:
        *begins, depth = sections(stitched.stages[-1])
        begin = next((layer for layer in begins if 2 * layer >= depth), begins[-1])
        results = yield stitched.ask(self.measures, measured=(begin, depth), asking=stitched.question)
        chunks = np.setdiff1d(stitched.chunks, anchor(stitched)).astype(np.int32)
        score: NDArray[np.float64] = results[Measure.VALUED_SCORE][:, chunks].sum(0, dtype=np.float64)
        return top(score, chunks, count)


def anchor(stitched: Stitched) -> Tokens:
    """Token indexes of the chunk whose KV equals full attention's, int32 [n]; empty if there is no such chunk."""
    i = stitched.exact_chunk
    return indices(0, 0) if i is None else indices(*stitched.prompt.bounds(i))
