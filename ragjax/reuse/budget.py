"""A budget for one request: the least recompute ratio whose divergence is forecast to lie within it.

Ours. The question is computed over the chunks as they are. From its signals (`signals.py`), the attention that it pays
to what may be recomputed, and the entropy of the next token, the divergence at each ratio of a ladder is forecast
(`core.fit.Forecast`). Questions that were held out say how low a forecast must be for the budget to be kept at the
stated confidence. The least ratio whose forecast is as low is carried out as `fitted` does; where none is, all chunk
tokens are recomputed, which is full attention, and the answer says so. So it does where the KV that was found is not
as the fit had it: not preprocessed, or of less precision.

The slots for a repair of all tokens are reserved before the first pass, and those that are not needed are given back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ragjax.core import Measure, Plan, Prefill, Prompt, RequestError
from ragjax.core.fit import Fit, Forecast
from ragjax.reuse.anchor import Anchored
from ragjax.reuse.base import LOGITS, Allocation
from ragjax.reuse.fitted import NAME, Weighted, probe, read
from ragjax.reuse.head import is_plain
from ragjax.reuse.repair import Selective, chunk_tokens
from ragjax.reuse.select import share
from ragjax.reuse.signals import Signals
from ragjax.reuse.stitch import Source, Stitched, prepare, reserve

UNFITTED = "a selector that was fitted to this model: run python -m ragjax.reuse.gate --fit, and start again"
"""What a request lacks that asks for `fitted`, or brings a budget, where there is no fit."""

RATIO, EXPECTED = "quality_ratio", "quality_kl"
"""Figures of an answer: the ratio carried out, and the KL to expect there, in nats; no KL where none is known."""


class Budgeted(Selective):
    """`fitted` at the ratio that one request's budget takes.

    kl: nats, what the answer's mean KL is to be at most.
    """

    selective = False

    def __init__(self, source: Source, weighted: Weighted, forecast: Forecast, kl: float):
        super().__init__(NAME, source, weighted)
        self.kl = kl
        self._weighted = weighted
        self._forecast = forecast

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """As `Selective`; a prompt without chunks keeps any budget."""
        plan = yield from super().prefill(prompt, allocation, ratio)
        return _told(plan, 0.0, _none_lost(plan)) if is_plain(prompt) else plan

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        """What is missing, the pass that is measured, and the repair that the forecast takes."""
        total = chunk_tokens(prompt)
        stitched = yield from prepare(prompt, allocation, self._source, repaired=total)
        results = yield probe(stitched, LOGITS)
        found, logits = read(stitched, results), results[Measure.LOGITS][0]
        if not len(found.tokens):  # one chunk, which is exact as it is
            plan = stitched.plan(stitched.spans, logits)
            return _told(plan, 0.0, _none_lost(plan))
        ratio, expected = 1.0, None
        if stitched.fused and not stitched.lossy:
            ratio, expected = self.pick(found, entropy(logits), total)
        count = share(ratio, total)
        chosen = stitched.chunks if ratio == 1.0 else self._weighted.highest(found, count)
        stitched = self._keep_only(stitched, allocation, len(chosen) if count else 0)
        if not count:
            return _told(stitched.plan(stitched.spans, logits), ratio, expected)
        last = stitched.repair(chosen)
        results = yield last
        return _told(stitched.plan(last.spans, results[Measure.LOGITS][0], chosen), ratio, expected)

    def pick(self, found: Signals, entropy: float, total: int) -> tuple[float, float]:
        """The least ratio that keeps the budget, and the KL to expect there, in nats; 1 and 0 if there is none.

        entropy: of the next token, in nats. total: chunk tokens, of which the ratio is a share.
        """
        counts = [share(ratio, total) for ratio in self._forecast.ratios]
        parts = (self._weighted.part(found, self._weighted.highest(found, count)) for count in counts)
        expected = [self._forecast.log_kl(part, found.mass, entropy) for part in parts]
        at = self._forecast.pick(self.kl, expected)
        return (1.0, 0.0) if at is None else (self._forecast.ratios[at], math.exp(expected[at]))

    def _keep_only(self, stitched: Stitched, allocation: Allocation, count: int) -> Stitched:
        """Of the slots for recomputed tokens only so many; fewer than were given back can always be had."""
        allocation.free(stitched.repaired)
        return replace(stitched, repaired=reserve(allocation, count))


class Fitted(Selective):
    """The strategy `fitted`, of a model that was fitted.

    top_k: chunks of a question that it was fitted with. digest: of the fit.
    """

    def __init__(self, fit: Fit):
        self._weighted = Weighted(fit.weights)
        self._forecast = fit.forecast
        self.top_k = fit.top_k
        self.digest = fit.digest
        super().__init__(NAME, Anchored(), self._weighted)

    def within(self, kl: float) -> Budgeted:
        """The same for one request, at the ratio that its budget takes. kl: nats.

        Raises:
            RequestError: if no forecast was made with the fit.
        """
        if self._forecast is None:
            raise RequestError(
                "the model's fit forecasts no divergence, for too few questions were held out: run "
                "python -m ragjax.reuse.gate --fit with more of them",
                param="rag.quality.kl",
                code="invalid_value",
            )
        return Budgeted(Anchored(), self._weighted, self._forecast, kl)


def entropy(logits_V: np.ndarray) -> float:
    """Of the distribution that logits give, in nats."""
    x_V = logits_V.astype(np.float64) - float(logits_V.max())
    p_V = np.exp(x_V)
    total = float(p_V.sum())
    return float(np.log(total) - (p_V * x_V).sum() / total)


def _none_lost(plan: Plan) -> float | None:
    """The KL to expect where nothing had to be recomputed: none, unless KV lost precision."""
    return 0.0 if plan.exact_to == "full" else None


def _told(plan: Plan, ratio: float, expected: float | None) -> Plan:
    known: Mapping[str, float] = {} if expected is None else {EXPECTED: expected}
    return replace(plan, figures={**plan.figures, RATIO: ratio, **known})
