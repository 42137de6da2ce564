"""naive and packet: every chunk is computed once behind the system prompt alone and reused anywhere, unrepaired.

Sources: TurboRAG (arXiv 2410.07590) and PromptCache (2311.04934), the full reuse of FusionRAG section 2.2. A chunk
attends to the system prompt and to itself; it is computed at the position right behind the system prompt and moved
to its place by a RoPE offset when it is read. If all chunks and the head are known, only the query segments behind the
first chunk are computed.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.core import Exactness, Measure, Prefill, Prompt, Wrapper
from ragjax.reuse.base import Allocation
from ragjax.reuse.stitch import Isolated, SourceStrategy, alone, prepare

PACKET = "packet"
"""Name of the strategy."""


class Naive(SourceStrategy):
    """Full reuse of isolated chunks; approximate as soon as two chunks stand together.

    A model that was trained to read such chunks (Block-Attention, arXiv 2409.15355; `train.depft --target teacher`)
    says what it was trained to say: its answers are exact to "block", whatever was kept, from wherever it came.
    """

    name = "naive"

    def __init__(self, exact_to: Exactness | None = None, method: str = "naive"):
        """exact_to: what answers over several chunks are exact to (None: they are approximate)."""
        self._exact_to = exact_to
        self._source = Isolated(method)

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        stitched = yield from prepare(prompt, allocation, self._source)
        results = yield stitched.ask()
        plan = stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        if plan.exact_to is not None or allocation.lossy:
            return plan
        return replace(plan, exact_to=self._exact_to)


class Packet(Naive):
    """packet: full reuse of chunks between soft tokens that make up for what they did not see (arXiv 2604.13226).

    A chunk is computed behind the system prompt alone, between a header and a trailer whose embeddings were trained for
    the model (`models/trained.py`), and kept with them; one that stands alone needs none. The paper computes its
    documents without a system prompt. Answers are exact to "packet": what this arrangement gives.
    """

    name = PACKET

    def __init__(self, wrapper: Wrapper):
        super().__init__("packet", "packet")
        self._wrapper = wrapper

    def dress(self, prompt: Prompt) -> Prompt:
        return prompt if alone(prompt) else self._wrapper.dressed(prompt)
