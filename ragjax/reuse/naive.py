"""naive: every chunk is computed once behind the system prompt alone and reused anywhere, unrepaired.

Sources: TurboRAG (arXiv 2410.07590) and PromptCache (2311.04934), the full reuse of FusionRAG section 2.2. A chunk
attends to the system prompt and to itself; it is computed at the position right behind the system prompt and moved
to its place by a RoPE offset when it is read. If all chunks are known, only the query segments (earlier turns and
question) are computed.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.outlook import Outlook
from ragjax.core import Exactness, Measure, Plan, Prefill, Prompt, Tokens
from ragjax.reuse.base import Allocation, Strategy
from ragjax.reuse.condense import Condensed
from ragjax.reuse.stitch import Isolated, Source, keys, outlook, prepare


class Naive(Strategy):
    """Full reuse of isolated chunks; approximate as soon as two chunks stand together.

    A model that was trained to read such chunks (Block-Attention, arXiv 2409.15355; `train.depft --target teacher`)
    says what it was trained to say: its answers are exact to "block", whatever was kept, from wherever it came.
    """

    name = "naive"
    condensed = True

    def __init__(self, exact_to: Exactness | None = None, source: Source | None = None):
        """Reuse what a source gives.

        exact_to: what answers over several whole chunks are exact to (None: they are approximate). source: of the
            chunks' KV (None: isolated, condensed where it is).
        """
        self._exact_to = exact_to
        self._source = Condensed(Isolated()) if source is None else source

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the system prompt, and each chunk behind it."""
        return keys(prompt, cache, tenant, self._source)

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The same, each chunk by itself."""
        return outlook(prompt, cache, tenant, self._source)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """At most two passes: the system prompt and chunks that are missing, then the query segments."""
        stitched = yield from prepare(prompt, allocation, self._source)
        results = yield stitched.ask()
        plan = stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        if plan.exact_to is not None or allocation.lossy or any(report.dropped for report in plan.reports):
            return plan
        return replace(plan, exact_to=self._exact_to)

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Answers depend on all chunks at once and are not kept."""
