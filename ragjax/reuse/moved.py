"""moved: any stretch of tokens that an earlier request computed is reused wherever it stands now; ours.

Behind the longest exact prefix the prompt is searched for stretches that nodes of the cache hold, whatever stood before
them there. A stretch keeps its KV, which saw what stood before it in its own request, and is moved by a RoPE offset. So
a document keeps its inner coherence, which isolated chunks lose: a new header, an edit before it, turns that left, or
another place in the conversation change only what it saw from afar. (CacheBlend and Cache-Craft reuse whole chunks that
somebody has cut; LMCache's CacheBlend engine finds them by separators.)

The first tokens of each stretch are computed anew, since they saw most of what has changed (LegoLink of EPIC, arXiv
2410.15332, recomputes them too), and so are the last tokens of the prompt, which ask. What is computed behind a moved
stretch is approximate, and is kept as such for later requests. A prompt without a known stretch is served as `prefix`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.cache.match import Totals
from ragjax.cache.node import raw_of
from ragjax.cache.stretches import MOVED, Stretch
from ragjax.cache.tree import Provenance, join_runs
from ragjax.core import Measure, Pass, Plan, Prefill, Prompt, Run, Span, Tokens
from ragjax.reuse.base import Allocation, Strategy, indices, match_spans, report
from ragjax.reuse.exact import Prefix, cuts

ASKING = 32
"""Last tokens of a prompt, which are always computed: the question has to see what stands before it."""

MENDED = 8
"""First tokens of a stretch that are computed anew, unless the same tokens stood before it."""

LEAST = 8
"""Tokens of the shortest stretch that is moved."""

LEAST_FIRST = 32
"""Least tokens of the first stretch and those that follow it at once, together: they end the exact prefix, which a
conversation would extend."""


class Moved(Strategy):
    """Reuses stretches of earlier prompts and answers at any place."""

    name = MOVED
    steady = False
    exact = True

    def __init__(self, mended: int = MENDED):
        self._mended = mended

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """That of `prefix`, if nothing is moved; else nothing that another request could wait for."""
        return Outlook() if self._found(prompt, cache, tenant)[1] else Prefix().outlook(prompt, cache, tenant)

    def work(self, prompt: Prompt, cache: KnowledgeCache, tenant: str, ratio: float | None = None) -> int:
        hit, found = self._found(prompt, cache, tenant)
        return len(prompt) - hit - sum(stretch.length for stretch in found)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """One pass over all tokens that stand in no known stretch."""
        found = self._found(prompt, allocation.cache, allocation.tenant)[1]
        if not found:
            return (yield from Prefix().prefill(prompt, allocation))
        n, tokens, page_size = len(prompt), prompt.tokens, allocation.page_size
        matched = allocation.prefix(tokens[: found[0].begin])
        # the longest stretches, as many as a step can read beside what is computed between them
        found, runs = sorted(found, key=lambda one: one.length, reverse=True), len(matched.spans) + 1
        while found and not allocation.limits.holds(n + allocation.decode_tokens, 2 * len(found) + runs):
            found.pop()
        found.sort(key=lambda one: one.begin)
        matches = [(one, match) for one in found if (match := allocation.stretch(one)) is not None]
        if not matches:
            return (yield from Prefix().prefill(prompt, allocation))
        moved = list[Span]()
        for one, match in matches:
            ((run, start),) = match.spans
            piece = run.slice(one.at, one.at + one.length, page_size)
            moved.append(Span.consecutive(one.begin, piece, one.begin - start - one.at))
        taken = np.concatenate([indices(0, matched.length), *(span.indices for span in moved)])
        rows = np.setdiff1d(indices(0, n), taken).astype(np.int32)
        run = allocation.reserve_with_tail(len(rows))
        fresh = [
            Span.consecutive(int(rows[a]), run.slice(a, b, page_size))
            for a, b in pairwise([0, *(np.flatnonzero(np.diff(rows) > 1) + 1).tolist(), len(rows)])
        ]
        behind = sorted((*moved, *fresh), key=lambda span: int(span.indices[0]))
        spans = (*match_spans(matched, 0), *behind)
        results = yield Pass(rows, rows, spans, self.measures, (n - 1,))
        totals = Totals(n - len(rows), len(rows))
        first = int(moved[0].indices[0])
        for span in fresh:
            at, end = int(span.indices[0]), min(int(span.indices[-1]) + 1, prompt.kept(allocation.cache.keep))
            if end - at <= self._mended or end == n:  # nothing new; what ends the prompt is kept with the answer
                continue
            piece = span.run.slice(0, end - at, page_size)
            if end <= first:
                public = min(prompt.public, end)
                allocation.cache.admitter.admit_prefix(
                    matched, tokens[:end], at, piece, cuts(prompt, end), public, totals
                )
            else:
                self._keep(allocation, tokens[:end], piece, at, totals)
        computed = {i: rows[(rows >= a) & (rows < b)] for i, (a, b) in enumerate(pairwise(prompt.starts))}
        tiers = [tier for match in (matched, *(match for _, match in matches)) if (tier := match.tier()) is not None]
        account = report(prompt, {}, dict.fromkeys(computed, max(tiers)), recomputed=computed)
        tail = run.slice(len(rows), run.length, page_size)
        figures = {"moved": float(sum(span.run.length for span in moved))}
        return Plan(spans, tail, None, account, results[Measure.LOGITS][0], figures)

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Keep the finished turn: as `prefix` does, or what was computed last with the answer."""
        if "moved" not in plan.figures:
            Prefix().finish(prompt, plan, generated, allocation)
            return
        if prompt.kept(allocation.cache.keep) < len(prompt):
            return
        last, at = plan.spans[-1].run, int(plan.spans[-1].indices[0])
        run = join_runs(last, plan.tail.slice(0, len(generated), allocation.page_size), allocation.page_size)
        told = np.concatenate([prompt.tokens, generated]) if run is not None else prompt.tokens
        self._keep(allocation, told, last if run is None else run, at, Totals(at, len(prompt) - at))

    def _keep(self, allocation: Allocation, tokens: Tokens, run: Run, begin: int, totals: Totals) -> None:
        """Keep what was computed from `begin` on behind moved stretches, on no context: its tokens alone find it."""
        before = raw_of(tokens[max(0, begin - self._mended) : begin])
        nothing = allocation.prefix(tokens[:0], quiet=True)
        allocation.cache.admitter.admit_segment(
            nothing, tokens[begin:], run, begin, Provenance.APPROXIMATE, MOVED, behind=before, totals=totals
        )  # fmt: skip

    def _found(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[int, list[Stretch]]:
        """Tokens of the exact prefix on the device or in host memory, and the stretches behind it."""
        raw = raw_of(prompt.tokens)
        hit = sum(used for _, used in cache.tree.walk(raw[:-4], tenant))
        kept: list[Stretch] = []
        for begin, node, at, length in cache.tree.stretches.find(raw, hit, len(prompt) - ASKING, tenant):
            assert node.parent is not None
            before = (node.behind if node.method == MOVED else node.parent.raw) + node.raw[: 4 * at]
            before = before[-4 * self._mended :]
            goes_on = before and raw.endswith(before, 0, 4 * begin)
            seam = 0 if goes_on else self._mended
            if length - seam >= LEAST:
                kept.append(Stretch(begin + seam, node, at + seam, length - seam))
        while kept and self._together(kept) < LEAST_FIRST:
            kept.pop(0)
        return hit, kept

    def _together(self, found: list[Stretch]) -> int:
        """Tokens of the first stretch and of those that follow it with a seam between at most."""
        length, end = 0, found[0].begin
        for one in found:
            if one.begin - end > self._mended:
                break
            length, end = length + one.length, one.begin + one.length
        return length
