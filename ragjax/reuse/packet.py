"""packet: every chunk is reused as it is, between soft tokens that make up for what it did not see (KV Packet).

Source: arXiv 2604.13226. A chunk is computed behind the system prompt alone, between a header and a trailer whose
embeddings were trained for the model (`models/packet.py`), and kept with them. Nothing is recomputed, as in `naive`.
The paper computes its documents without a system prompt; here they see it, as all chunks do. A chunk that stands alone
needs no packet: it is exact as it is.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.outlook import Outlook
from ragjax.core import Measure, Prefill, Prompt, Wrapper
from ragjax.reuse.base import Allocation
from ragjax.reuse.naive import Naive
from ragjax.reuse.stitch import Isolated, alone, keys, outlook, prepare

SOURCE = Isolated("packet")


class Packet(Naive):
    """Full reuse of chunks between header and trailer.

    Its answers are exact to "packet": what this arrangement gives, whatever was kept, from wherever it came.
    """

    name = "packet"
    condensed = False

    def __init__(self, wrapper: Wrapper):
        """wrapper: the tokens around each chunk."""
        self._wrapper = wrapper

    def dress(self, prompt: Prompt) -> Prompt:
        """Every chunk in its packet; a chunk that stands alone stays as it is."""
        return prompt if alone(prompt) else self._wrapper.dressed(prompt)

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the system prompt, and each packet behind it."""
        return keys(prompt, cache, tenant, SOURCE)

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The same, each packet by itself."""
        return outlook(prompt, cache, tenant, SOURCE)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """At most two passes: the system prompt and packets that are missing, then the query segments."""
        stitched = yield from prepare(prompt, allocation, SOURCE)
        results = yield stitched.ask()
        plan = stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        if alone(prompt) or allocation.lossy:
            return plan
        return replace(plan, exact_to="packet")
