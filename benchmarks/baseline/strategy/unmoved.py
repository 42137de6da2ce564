"""unmoved: full reuse at stale positions, a baseline (FusionRAG, section 1.1; DepCache's "without repositioning").

Every chunk is computed alone behind the system prompt, as in `naive`, but its keys are read at the positions they were
rotated at: all chunks overlap right behind the system prompt, while the question has its own positions.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.core import Measure, Prefill, Prompt
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import Allocation
from ragjax.reuse.naive import Naive
from ragjax.reuse.stitch import Isolated, prepare


class Unmoved(Naive):
    """Full reuse without repositioning: shows what RoPE offsets are worth."""

    name = "unmoved"

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        """The passes of `naive`, with every chunk's keys where they were computed."""
        stitched = yield from prepare(prompt, allocation, Isolated())
        stitched = replace(stitched, chunk=tuple(replace(span, offset=0) for span in stitched.chunk))
        results = yield stitched.ask()
        return stitched.plan(stitched.spans, results[Measure.LOGITS][0])


@STRATEGIES.register("unmoved")
def unmoved(model: ModelTraits) -> Unmoved:
    return Unmoved()
