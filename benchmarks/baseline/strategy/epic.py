"""epic: the first tokens of each chunk are recomputed (LegoLink of EPIC, arXiv 2410.15332).

A chunk that was computed by itself took its own first tokens for the beginning of the text, and gives them the
attention that beginnings draw. LegoLink recomputes the first k tokens of every chunk but the first, so that they no
longer look like one. The paper's k is 8 to 32; here it is what the share gives, the same for all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragjax.core import Kind, Tokens
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import segments_of
from ragjax.reuse.repair import Choice, Selective, Selector
from ragjax.reuse.stitch import Isolated, Stitched


class Leading(Selector):
    """The first tokens of each chunk; those of the first chunk only when all others are recomputed."""

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """No pass is needed."""
        yield from ()
        spans = [stitched.prompt.bounds(i) for i in segments_of(stitched.prompt, Kind.CHUNK)]
        first, *others = spans
        rest = sum(end - begin for begin, end in others)
        return np.sort(np.concatenate([leading([first], count - rest), leading(others, min(count, rest))]))


def leading(spans: Sequence[tuple[int, int]], count: int) -> Tokens:
    """The first k tokens of each of the spans [begin, end), `count` in all, int32 [count], ascending.

    Short spans are taken whole. What does not divide evenly goes to the earlier spans. A count below 0 is as 0.
    """
    depth = np.concatenate([np.zeros(0, int), *(np.arange(end - begin) for begin, end in spans)])
    token = np.concatenate([np.zeros(0, np.int32), *(np.arange(*span, dtype=np.int32) for span in spans)])
    return np.sort(token[np.argsort(depth, kind="stable")[: max(0, count)]])


@STRATEGIES.register("epic")
def epic(model: ModelTraits) -> Selective:
    return Selective("epic", Isolated(), Leading())
