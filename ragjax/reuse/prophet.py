"""prophet: tokens that the question attends to most, over all layers together (ProphetKV, arXiv 2602.02579).

Its two stages: the question is computed over the reused KV, through all layers, and the attention that each token
receives from it is fused over the layers into one score; then the tokens of highest score are recomputed in every layer
and the question once more. So tokens that draw everybody's attention do not crowd out those that this question needs.

The paper's abstract and figures were at hand, and not its equations: the fusion is the mean over layers, each layer's
scores over the chunks scaled to 1, so that no layer counts for more because less of its attention goes elsewhere.
`fusion` looks at the last layer alone, `ragjax` at attention times values.
"""

from __future__ import annotations

import numpy as np

from ragjax.core import Measure
from ragjax.reuse.repair import Choice, Selector
from ragjax.reuse.select import shares, top
from ragjax.reuse.stitch import Stitched


class Prophetic(Selector):
    """Tokens of the highest mean share of the question's attention."""

    measures = frozenset({Measure.KEY_SCORE})

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """One pass: the query segments over the chunks as they are, measured in all layers."""
        results = yield stitched.ask(self.measures, asking=stitched.question)
        score_LN = np.asarray(results[Measure.KEY_SCORE][:, stitched.chunks], np.float64)
        return top(shares(score_LN).mean(0), stitched.chunks, count)  # a layer that gives nothing counts nothing
