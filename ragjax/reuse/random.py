"""random: Random-Recomp of Cache-Craft (section 5), which recomputes tokens drawn at random in each chunk."""

from __future__ import annotations

import hashlib

import numpy as np

from ragjax.core import Kind
from ragjax.reuse.base import segments_of
from ragjax.reuse.repair import Choice, Selector
from ragjax.reuse.select import budgets, top_each
from ragjax.reuse.stitch import Stitched


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
