"""Shadow replay: a finished request runs once more, in `full` and while nothing else runs, and the two are compared."""

from __future__ import annotations

import logging
import time

import numpy as np

from ragjax.core import Answer, Delta, Event, Grounded, Request, Sampling
from ragjax.engine.prepare import Preparation
from ragjax.quality.contract import QUEUE, Contract
from ragjax.quality.report import divergence
from ragjax.reuse.exact import Full
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)


class Replays:
    """Makes the requests that run finished ones again, and tells the contract what they show.

    Attributes:
        preparation: what their states are made with; given before the first request ends.
    """

    preparation: Preparation

    def __init__(self, contract: Contract):
        self._contract = contract
        self._waiting = 0

    def of(self, state: RequestState, answer: Answer) -> RequestState | None:
        """The request that runs this one again; None if there is nothing to compare, or too many wait already."""
        if not state.shadowed or (answer.exact_to == "full" and not answer.cached_tokens):
            return None
        if self._waiting >= QUEUE:
            self._contract.drop("dropped")
            return None
        live_NV = np.stack(state.shadowed)
        # row j predicts token j: the last token is not compared, and an end of text that was not kept needs no token
        said = np.array([*answer.tokens, 0][: len(live_NV)], np.int32)

        def sink(event: Event | BaseException) -> None:
            if isinstance(event, Delta):
                return
            self._waiting -= 1
            if isinstance(event, BaseException):
                self._contract.drop("failed")
                return
            try:
                assert event.scores is not None
                seen, exact = divergence(event.scores, live_NV), answer.exact_to == "full"
                self._contract.observe(state.setting, exact, seen, answer.predicted is not None)
            except Exception:  # a request that nobody waits for must not end others
                _log.exception("shadow replay failed")
                self._contract.drop("failed")

        request = Request(
            sampling=Sampling(max_tokens=1),
            rag=None,
            tenant=state.request.tenant,
            continuation=said,
            background=True,
            grounded=Grounded(state.plain),
        )
        self._waiting += 1
        return self.preparation.state(request, sink, time.perf_counter(), Full())
