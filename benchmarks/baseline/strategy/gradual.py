"""blend-gradual: CacheBlend with gradual narrowing (arXiv 2405.16444, section 4.3).

More tokens than asked for at first, then fewer from layer to layer, by the deviation there. Here it narrows at the
boundaries of stages, from twice the share down to the share. None is dropped behind the first layer, whose KV is that
of the token alone: it deviates by rounding, if at all. A token that is dropped uses its cached KV in the layers that
follow.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Measure, Move, Pass, Prefill, Prompt, Span, Tokens
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import LOGITS, Allocation
from ragjax.reuse.blend import PROBED, Deviation
from ragjax.reuse.repair import RATIO, chunk_tokens, share, top
from ragjax.reuse.stitch import Isolated, SourceStrategy, Stitched, prepare


class Gradual(SourceStrategy):
    """CacheBlend with gradual narrowing; of isolated chunks.

    The account counts every token that was recomputed in any layer, up to twice the ratio.
    """

    name = "blend-gradual"
    measures = LOGITS | Deviation.measures
    selective = True

    _source = Isolated()

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        """Passes over missing KV and two layers of everything, then stage by stage over fewer tokens."""
        total = chunk_tokens(prompt)
        ends = [end for end in allocation.stages[1:-1] if end >= PROBED]
        first, *fewer = narrowing(share(RATIO if ratio is None else ratio, total), total, len(ends) + 1)
        probing, selector = 0 < first < total, Deviation()
        scratch = total if probing else 0
        stitched = yield from prepare(prompt, allocation, self._source, repaired=first, scratch=scratch)
        if not first:
            results = yield stitched.ask()
            return stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        chosen = stitched.chunks
        if probing:
            chosen = yield from selector.choose(stitched, first)
            allocation.free(stitched.scratch)
        spans, kept, depth = stitched.mended(chosen), chosen, allocation.stages[-1]
        counts = dict(zip(ends, fewer, strict=True))
        for layers in pairwise(allocation.stages):
            count = counts.get(layers[1], len(kept))
            results = yield self._stage(stitched, spans, kept, layers, count < len(kept))
            if count < len(kept):
                kept, dropped = self._narrow(results[Measure.DEVIATION], stitched, kept, count)
                yield Move(dropped, stitched.chunk, spans, (layers[1], depth))
        logits = results[Measure.LOGITS][0]
        exact_to = stitched.plan(spans, logits, kept).exact_to  # only the kept ones were recomputed in every layer
        return replace(stitched.plan(spans, logits, chosen), exact_to=exact_to)

    def _stage(
        self, stitched: Stitched, spans: tuple[Span, ...], kept: Tokens, layers: tuple[int, int], narrows: bool
    ) -> Pass:
        rows = np.union1d(kept, stitched.queries).astype(np.int32)
        if layers[1] == stitched.stages[-1]:
            return Pass(rows, rows, spans, LOGITS, (len(stitched.prompt) - 1,), layers=layers)
        if narrows:
            return Pass(rows, rows, spans, Deviation.measures, layers=layers, stale=stitched.chunk)
        return Pass(rows, rows, spans, layers=layers)

    def _narrow(
        self, deviation: NDArray[np.float32], stitched: Stitched, kept: Tokens, count: int
    ) -> tuple[Tokens, Tokens]:
        """The tokens that deviate most in the stage's last layer, and the others."""
        rows = np.union1d(kept, stitched.queries)
        narrowed = top(deviation[-1, np.searchsorted(rows, kept)], kept, count)
        return narrowed, np.setdiff1d(kept, narrowed).astype(np.int32)


def narrowing(count: int, total: int, stages: int) -> tuple[int, ...]:
    """Tokens of each stage, from twice `count` (at most all) down to `count` in the last, evenly."""
    first = min(2 * count, total)
    early = (round(first + (count - first) * stage / (stages - 1)) for stage in range(stages - 1))
    return (*early, count)


@STRATEGIES.register("blend-gradual")
def gradual(model: ModelTraits) -> Gradual:
    return Gradual()
