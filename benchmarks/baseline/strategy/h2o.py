"""h2o: Prefill-HeavyHitter of Cache-Craft (section 5), which recomputes the most attended tokens of the chunks.

H2O (arXiv 2306.14048, section 4) calls the tokens of highest accumulated attention heavy hitters; it evicts the others
while decoding. Here, in prefill, a token's score is the attention it received from the rows of its own chunk, over all
layers and heads, when the chunk was computed behind the system prompt. The scores are recorded then and kept with the
chunk, under a method name of their own, so selection needs no pass. Early tokens are seen by more rows and score
higher, as in H2O.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Measure, Results
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.repair import Choice, Selective, Selector, top
from ragjax.reuse.stitch import Isolated, Stitched


class Recorded(Isolated):
    """Isolated chunks with the attention that each of their tokens received: float32 [n], summed over layers."""

    measures = frozenset({Measure.KEY_SCORE})

    def meta(self, results: Results, begin: int, end: int) -> bytes:
        """The pass computes the chunk's rows, and no other row sees its keys."""
        score: NDArray[np.float32] = results[Measure.KEY_SCORE][:, begin:end].sum(0)
        return score.astype("<f4").tobytes()


class HeavyHitters(Selector):
    """The tokens of highest recorded attention, over all chunks together."""

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """No pass is needed."""
        yield from ()
        scores = [np.frombuffer(stitched.meta[i], "<f4") for i in sorted(stitched.meta)]
        return top(np.concatenate(scores), stitched.chunks, count)


@STRATEGIES.register("h2o")
def h2o(model: ModelTraits) -> Selective:
    return Selective("h2o", Recorded("h2o"), HeavyHitters())
