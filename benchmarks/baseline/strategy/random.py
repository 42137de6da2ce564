"""random: Random-Recomp of Cache-Craft (section 5), which recomputes tokens drawn at random in each chunk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Kind, Tokens
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import segments_of
from ragjax.reuse.repair import Choice, Selective, Selector, top
from ragjax.reuse.stitch import Isolated, Stitched


class Random(Selector):
    """Uniform without replacement, in each chunk the same share; the prompt's tokens are the seed."""

    def choose(self, stitched: Stitched, count: int) -> Choice:
        """No pass is needed."""
        yield from ()
        prompt = stitched.prompt
        seed = int.from_bytes(hashlib.sha256(prompt.tokens.tobytes()).digest()[:8], "little")
        lengths = [len(prompt.segments[i]) for i in segments_of(prompt, Kind.CHUNK)]
        draws = np.random.default_rng(seed).random(len(stitched.chunks))
        return top_each(draws, stitched.chunks, lengths, budgets(lengths, count))


def top_each(scores: NDArray[np.floating], candidates: Tokens, lengths: Sequence[int], counts: Sequence[int]) -> Tokens:
    """`top` for each of the consecutive parts of `lengths` candidates by itself, ascending."""
    cuts = np.cumsum(lengths)[:-1]
    parts = zip(np.split(np.asarray(scores), cuts), np.split(candidates, cuts), counts, strict=True)
    return np.concatenate([top(score, part, count) for score, part, count in parts])


def budgets(lengths: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` tokens (at most all) spread over parts in proportion to their lengths, by largest remainder."""
    total = sum(lengths)
    exact = [count * length / total for length in lengths]
    given = [math.floor(part + 1e-9) for part in exact]
    by_remainder = sorted(range(len(lengths)), key=lambda i: (given[i] - exact[i], i))
    for i in by_remainder[: count - sum(given)]:
        given[i] += 1
    return tuple(given)


@STRATEGIES.register("random")
def random_tokens(model: ModelTraits) -> Selective:
    return Selective("random", Isolated(), Random())
