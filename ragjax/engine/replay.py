"""Shadow replay: a finished request runs once more, in `full` and while nothing else runs, and the two are compared.

Where the model has no quality report, settings that may serve such requests run it too, one after the other.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Answer, Event, Grounded, Kind, Prompt, Rag, Request, Sampling, Tokens
from ragjax.engine.prepare import Preparation
from ragjax.quality.contract import QUEUE, Contract
from ragjax.quality.evidence import ShadowTrial
from ragjax.quality.report import Setting, divergence
from ragjax.reuse.exact import Full
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)


@dataclass
class _Replay:
    """A finished request that runs again: in `full` first, then by each setting that is to be tried."""

    live: RequestState
    answer: Answer
    live_NV: NDArray[np.float32]  # logits of its first tokens
    said: Tokens  # these tokens
    full_NV: NDArray[np.float32] | None = None
    trials: dict[Setting, ShadowTrial] = field(default_factory=dict)
    left: list[Setting] = field(default_factory=list)


class Replays:
    """Makes the requests that run finished ones again, and tells the contract what they show."""

    preparation: Preparation

    def __init__(self, contract: Contract):
        self._contract = contract
        self._running: dict[str, _Replay] = {}  # by the name of the request that runs one again now

    def of(self, state: RequestState, answer: Answer) -> RequestState | None:
        """The request that is to run next for one that has ended; None if there is nothing to compare."""
        replay = self._running.pop(state.id, None)
        try:
            if replay is None:
                return self._begin(state, answer)
            return self._go_on(replay, state, answer)
        except Exception:  # a request that nobody waits for must not end others
            _log.exception("shadow replay failed")
            self._contract.drop("failed")
            return None

    def _begin(self, state: RequestState, answer: Answer) -> RequestState | None:
        tries = list(self._contract.candidates) if state.picked else []
        if not state.shadowed or (answer.exact_to == "full" and not answer.cached_tokens and not tries):
            return None
        if len(self._running) >= QUEUE:
            self._contract.drop("dropped")
            return None
        live_NV = np.stack(state.shadowed)
        # row j predicts token j: the last token is not compared, and an end of text that was not kept needs no token
        said = np.array([*answer.tokens, 0][: len(live_NV)], np.int32)
        return self._again(_Replay(state, answer, live_NV, said, left=tries))

    def _go_on(self, replay: _Replay, state: RequestState, answer: Answer) -> RequestState | None:
        """Take in what a replay shows; the next one, if there is any."""
        assert answer.scores is not None and state.plan is not None
        live = replay.live
        if replay.full_NV is None:
            replay.full_NV = answer.scores
            seen, exact = divergence(answer.scores, replay.live_NV), replay.answer.exact_to == "full"
            self._contract.observe(live.setting, exact, seen, replay.answer.predicted is not None)
        elif answer.exact_to != "full" and not state.lossy and not (state.plan.unfused and state.strategy.preprocessed):
            share = recomputed_share(state.prompt, answer)
            seen = divergence(replay.full_NV, answer.scores)
            replay.trials[Setting(state.strategy.name, state.ratio)] = ShadowTrial(seen, answer.timings.prefill, share)
        if replay.left:
            return self._again(replay)
        if replay.trials:
            self._contract.learn(live.prompt.chunks, replay.trials)
        return None

    def _again(self, replay: _Replay) -> RequestState:
        setting = None if replay.full_NV is None else replay.left.pop(0)
        request = Request(
            sampling=Sampling(max_tokens=1),
            rag=None if setting is None else Rag(top_k=0, recompute_ratio=setting.ratio),
            tenant=replay.live.request.tenant,
            continuation=replay.said,
            background=True,
            grounded=Grounded(replay.live.plain),
        )
        strategy = Full() if setting is None else self.preparation.composer.strategies[setting.strategy]

        def sink(event: Event | BaseException) -> None:
            if isinstance(event, BaseException):
                self._running = {name: other for name, other in self._running.items() if other is not replay}
                self._contract.drop("failed")

        state = self.preparation.state(request, sink, time.perf_counter(), strategy)
        self._running[state.id] = replay
        return state


def recomputed_share(prompt: Prompt, answer: Answer) -> float:
    chunks = [r for r, s in zip(answer.segments, prompt.segments, strict=True) if s.kind is Kind.CHUNK]
    return sum(report.recomputed for report in chunks) / max(1, sum(report.tokens for report in chunks))
