"""h2o: Prefill-HeavyHitter of Cache-Craft (section 5), which recomputes the most attended tokens of the chunks.

H2O (arXiv 2306.14048, section 4) calls the tokens of highest accumulated attention heavy hitters; it evicts the others
while decoding. Here, in prefill, a token's score is the attention that it receives from the rows of its own chunk, over
all layers and heads, where the chunk is computed behind the system prompt: one pass besides, into slots that are freed
then. Early tokens are seen by more rows and score higher, as in H2O.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.core import Kind, Measure, Prompt
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import segments_of
from ragjax.reuse.head import cut_head, head_length, system_length
from ragjax.reuse.repair import Choice, Selective, Selector, chunk_tokens, top
from ragjax.reuse.stitch import Isolated, Stitched, missing


class HeavyHitters(Selector):
    """The tokens of highest attention within their chunk, over all chunks together."""

    measures = frozenset({Measure.KEY_SCORE})

    def scratch(self, prompt: Prompt) -> int:
        return chunk_tokens(prompt)

    def choose(self, stitched: Stitched, count: int) -> Choice:
        prompt, size, runs, used = stitched.prompt, stitched.page_size, {}, 0
        for i in segments_of(prompt, Kind.CHUNK):
            n = len(prompt.segments[i])
            runs[i], used = stitched.scratch.slice(used, used + n, size), used + n
        length = head_length(prompt)
        head = cut_head(stitched.head, system_length(prompt), (length, len(prompt)), size)
        results = yield replace(missing(prompt, length, length, runs, head), measures=self.measures)
        return top(results[Measure.KEY_SCORE][:, stitched.chunks].sum(0), stitched.chunks, count)


@STRATEGIES.register("h2o")
def h2o(model: ModelTraits) -> Selective:
    return Selective("h2o", Isolated(), HeavyHitters())
