"""packet: every chunk is reused as it is, between soft tokens that make up for what it did not see (KV Packet).

Source: arXiv 2604.13226. A chunk is computed behind the system prompt alone, between a header and a trailer whose
embeddings were trained for the model (`models/trained.py`), and kept with them. Nothing is recomputed, as in `naive`.
The paper computes its documents without a system prompt; here they see it, as all chunks do. A chunk that stands alone
needs no packet: it is exact as it is.
"""

from __future__ import annotations

from ragjax.core import Prompt, Wrapper
from ragjax.reuse.naive import Naive
from ragjax.reuse.stitch import Isolated, alone

NAME = "packet"
"""Of the strategy."""


class Packet(Naive):
    """Full reuse of chunks between header and trailer.

    Its answers are exact to "packet": what this arrangement gives, whatever was kept, from wherever it came.
    """

    name = NAME

    def __init__(self, wrapper: Wrapper):
        """wrapper: the tokens around each chunk."""
        super().__init__("packet", Isolated("packet"))
        self._wrapper = wrapper

    def dress(self, prompt: Prompt) -> Prompt:
        """Every chunk in its packet; a chunk that stands alone stays as it is."""
        return prompt if alone(prompt) else self._wrapper.dressed(prompt)
