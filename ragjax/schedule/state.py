"""A request inside the engine: one object from its arrival to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragjax import core
from ragjax.quality.contract import STEPS
from ragjax.quality.report import Setting
from ragjax.reuse.base import Allocation, Strategy
from ragjax.reuse.compaction import compressed
from ragjax.schedule.lookup import Lookup
from ragjax.schedule.order import Waiting
from ragjax.schedule.rows import PendingCompaction, PendingMove, PendingRows, read_compaction, read_move, read_pass

if TYPE_CHECKING:
    from ragjax.schedule.generation import AnswerText
    from ragjax.schedule.sampling import Sampler

Sink = Callable[[core.Event | BaseException], None]
"""Where a request's events go: deltas, then one answer or one error."""


@dataclass(frozen=True)
class Paused:
    """The holdings of a paused request: its pages, int32 [P], copies of them, and the slots that its tail may have."""

    pages: NDArray[np.int32]
    copies: object
    decode_tokens: int


@dataclass
class Times:
    """When things happened to a request, `time.perf_counter()` seconds (0: not yet), and milliseconds by kind."""

    arrival: float = 0.0
    admitted: float = 0.0  # it was started first
    stopped: float = 0.0  # it last gave back what it held, to be started again
    confirmed: float = 0.0  # its documents were final, if it began before
    first_token: float = 0.0
    pauses: int = 0  # how often it gave its pages to others
    waits_since: float | None = None  # it began to wait for a load of KV; None while it does not
    lacks_since: float | None = None  # likewise for programs
    lacked_ms: float = 0.0  # it waited for programs before it could start
    compiled_ms: float = 0.0  # its steps did, before its first token
    retrieve_ms: float = 0.0
    again_ms: float = 0.0  # between being stopped and being started again
    load_ms: float = 0.0  # waited for loads, those in vain too
    compute_ms: float = 0.0

    def start(self, began: float, ready: float | None) -> None:
        self.waits_since = began
        self.admitted = self.admitted or began
        if self.stopped and not self.first_token:
            self.again_ms += (began - self.stopped) * 1e3
        if ready is not None:
            self.stop_waiting(ready)

    def stop_waiting(self, now: float) -> None:
        """The KV that it waited for is there. Waiting after the first token, for a lost device, is not counted."""
        if self.waits_since is not None and not self.first_token:
            self.load_ms += (now - self.waits_since) * 1e3
        self.waits_since = None

    def stop_lacking(self, now: float) -> None:
        if self.lacks_since is not None:
            self.lacked_ms += (now - self.lacks_since) * 1e3
        self.lacks_since = None

    def note_compiled(self, seconds: float) -> None:
        if not self.first_token:
            self.compiled_ms += seconds * 1e3

    def stop(self, now: float) -> None:
        self.stop_waiting(now)
        self.stopped = now

    @property
    def prefill_ms(self) -> float:
        """From its first start to its first token, without loads, programs, and waiting to be started again."""
        return (self.first_token - self.admitted) * 1e3 - self.again_ms - self.load_ms - self.compiled_ms

    @property
    def ttft_ms(self) -> float:
        """From its arrival to its first token; its client had none before its documents were final."""
        return (max(self.first_token, self.confirmed) - self.arrival) * 1e3


class Phase(Enum):
    WAITING = "waiting"  # to be started, for the first time or again
    RUNNING = "running"  # it holds pages
    PAUSED = "paused"  # its KV is in host memory, while others have its pages
    ENDED = "ended"


@dataclass
class Inquired:
    until: float  # when the request waits no longer for answers, `time.monotonic()` seconds
    open: Collection[str] = ()  # those that its last look ahead raised
    over: bool = False


@dataclass(eq=False)
class RequestState(Waiting):
    """One request, from its arrival to its last token."""

    # what is asked
    id: str
    request: core.Request
    prompt: core.Prompt  # as the strategy has the model read it
    plain: core.Prompt  # the same as it was made
    strategy: Strategy
    ratio: float | None = None  # share of chunk tokens to recompute
    compression: core.Compression | None = None  # None: tokens of the answer see the whole prompt
    generation: AnswerText | None = None  # None: only the prompt is computed
    sink: Sink = lambda event: None
    times: Times = field(default_factory=Times)
    sampler: Sampler | None = None  # chooses its tokens
    lookup: Lookup | None = None  # proposes tokens beside each that it decodes; None: nothing
    by_default: bool = False  # it left the strategy to the engine
    picked: bool = False  # the quality contract has evidence of such requests, and picked the setting

    # where it stands
    phase: Phase = Phase.WAITING
    cancelled: bool = False  # its client left; set by any thread
    restarts: int = 0  # times that a fault had it started again
    may_load: bool = True  # use KV that must be loaded; a request that waited in vain computes it
    suspect: bool = False  # a step that it was in failed: it runs alone until it is past that place
    speculative: bool = False  # begun before its search had ended, its documents are not confirmed yet
    answer: core.Answer | None = None  # which it ended with while they were not

    # while it waits (and the fields of `Waiting`)
    awaited: Mapping[bytes, int] = field(default_factory=dict)  # pieces that others compute: tokens by name
    tried: bool = False  # it was matched and counted, and found no room
    ahead: int | None = None  # pages of the loads that were ordered for it; None: nothing was looked up ahead
    inquiry: Inquired | None = None

    # what it holds while it runs
    started: core.Prompt | None = None  # the prompt as it was last started: followed by what was generated before
    allocation: Allocation | None = None
    rows: PendingRows | None = None  # they wait for a step; or
    move: PendingMove | PendingCompaction | None = None  # it waits for its KV
    chosen: core.Chosen | None = None  # the token behind the prompt, chosen in the step that computed its last row
    known: NDArray[np.float32] | None = None  # logits [V] of that row, if the prefill told them before its end
    first: core.Chosen | None = None  # the token behind the prompt, if it went out before the prefill's end
    plan: core.Plan | None = None  # once the prompt is computed
    decoded: list[int] = field(default_factory=list)  # tokens generated since it was started
    tail_N: NDArray[np.int32] | None = None  # their slots, once there may be any
    paused: Paused | None = None  # its KV while it is paused
    passed: int = 0  # rows of its finished passes that began at the first layer

    # what came of it
    logits: NDArray[np.float32] | None = None  # of the prompt's last token, [V]
    scores: NDArray[np.float32] | None = None  # logits that predict the continuation, [n, V], or as `read` makes them
    shadowed: list[NDArray[np.float32]] | None = None  # logits [V] of its first steps, if it is to be replayed
    notices: list[str] = field(default_factory=list)
    facts: tuple[core.FactReport, ...] = ()  # relation paths of the prompt
    kept: tuple[tuple[int, float], ...] = ()  # as `Grounded.kept`
    sources: tuple[core.Citation, ...] = ()  # its passages
    cited: bool = False  # they went out
    # the account of every segment as it was asked, by the first start that computed all of it: later ones find what
    # that one kept
    reports: tuple[core.SegmentReport, ...] = ()
    lossy: bool = False  # KV that it found lost precision at rest

    _exact_before: set[str | None] = field(default_factory=set)  # of plans whose tokens went out before a restart
    _prefill: core.Prefill | None = None
    _measures: frozenset[core.Measure] = frozenset()
    _before: PendingRows | None = None

    @property
    def background(self) -> bool:
        return self.request.background

    @property
    def setting(self) -> Setting:
        """Strategy, ratio and compression that serve it, as quality reports name them."""
        kept = None if self.compression is None else str(self.compression)
        return Setting(self.strategy.name, self.ratio, kept)

    @property
    def generated(self) -> core.Tokens:
        return np.array([] if self.generation is None else self.generation.tokens, np.int32)

    @property
    def decode_tokens(self) -> int:
        """Slots needed after the prompt, and after what was generated already."""
        forced = 0 if self.request.continuation is None else len(self.request.continuation)
        limit = 0 if self.generation is None else self.generation.limit
        return max(forced, limit) - len(self.generated)

    @property
    def compresses(self) -> bool:
        """True if its prompt is above its budget; what was generated before it was started again does not count."""
        return self.compression is not None and len(self.prompt) > self.compression.budget

    @property
    def forced_tokens(self) -> int:
        """Slots needed after the prompt at once: tokens of the continuation that are still to be computed."""
        continuation = self.request.continuation
        return len(continuation) if continuation is not None and self.wants_scores else 0

    @property
    def wants_logits(self) -> bool:
        """True if the logits that its next token is chosen by are kept, for a replay to be compared with."""
        return self.shadowed is not None and len(self.shadowed) < STEPS

    @property
    def wants_first(self) -> bool:
        return self.first is None and self.generation is not None and not self.generation.over

    @property
    def reads_logits(self) -> bool:
        wanted = self.request.want_logits or self.shadowed is not None or self.wants_scores
        return wanted or self.strategy.reads_logits

    @property
    def wants_scores(self) -> bool:
        """True if its continuation is to be computed before anything is generated."""
        return self.request.continuation is not None and len(self.request.continuation) > 0 and self.scores is None

    def read(self, logits_V: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        """The kept part of the logits that predict this token of a continuation.

        They are kept as they are, or of a prompt that is echoed its log-probability, and ids and log-probabilities of
        the likeliest tokens: float32 [1 + 2 n]. All logits of a prompt would be hundreds of megabytes.
        """
        if not self.request.echo or self.request.continuation is None:
            return logits_V
        top = np.argsort(-logits_V, kind="stable")[: self.request.sampling.logprobs]
        most = logits_V.max()
        total = most + np.log(np.exp(logits_V - most).sum())
        chosen = logits_V[self.request.continuation[number]]
        return np.array([chosen - total, *top, *(logits_V[top] - total)], np.float32)

    @property
    def computed(self) -> int:
        """Tokens computed for it, prompt and answer: rows that went through the first layer."""
        under_way = self.rows.done if self.rows is not None and self.plan is None and not self.rows.layers[0] else 0
        return self.passed + under_way + len(self.decoded)

    @property
    def whole_prompt(self) -> core.Prompt:
        """The prompt, and after it what was generated before the request was started again."""
        return self.prompt.followed_by(self.generated)

    @property
    def running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def decoding(self) -> bool:
        return self.plan is not None

    @property
    def tells_early(self) -> bool:
        """True if the token behind the prompt can go out now, before the prefill's end."""
        return self.known is not None and self.wants_first and not self.wants_scores

    @property
    def ready(self) -> bool:
        return self.stages_ready == len(self.held.stages) - 1

    @property
    def stages_ready(self) -> int:
        """Number of first stages whose KV, all that it reads, is on the device; 0 if some is lost."""
        return 0 if self.held.broken is not None else self.held.stages_ready

    @property
    def can_move(self) -> bool:
        """True if a move or a compaction is next, of KV that is on the device."""
        return self.move is not None and self.held.stages[self.stages_ready] >= self.move.layers[1]

    @property
    def exact_to(self) -> core.Exactness | None:
        """The attention that all of its answer is exact to, what it said before it was started again included."""
        assert self.plan is not None
        return self.plan.exact_to if self._exact_before <= {self.plan.exact_to} else None

    @property
    def full_prompt(self) -> core.Prompt:
        assert self.started is not None
        return self.started

    @property
    def held(self) -> Allocation:
        assert self.allocation is not None
        return self.allocation

    @property
    def all_layers(self) -> tuple[int, int]:
        return 0, self.held.stages[-1]

    def start(self, allocation: Allocation) -> None:
        """Match, reserve, and reach the first pass or move, or the plan of a prefill that needs none.

        OutOfPages: there is no room now; the request holds nothing then and may be started later.
        """
        prompt = self.whole_prompt
        self.allocation, self.started = allocation, prompt
        self.plan, self.first, self.decoded, self.tail_N = None, None, [], None
        self.lossy = self.lossy and len(self.generated) > 0  # of what went out already it stays true
        self._prefill = self.strategy.prefill(prompt, allocation, self.ratio)
        if self.compresses and self.compression is not None:
            self._prefill = compressed(self._prefill, prompt, allocation, self.compression)
        try:
            self._go_on(None)
            allocation.check_growth()
        except core.OutOfPages:
            self.stop()
            raise
        self.phase = Phase.RUNNING

    def advance(self, moved: core.Results | None = None) -> None:
        """Hand the results of the finished pass or move to the strategy; sets the next one, or the plan."""
        assert self._prefill is not None
        results = moved or {}
        if self.move is None:
            assert self.rows is not None and not self.rows.left
            self.passed += len(self.rows.token) if not self.rows.layers[0] else 0
            if self.rows.first_at is not None:
                self.chosen = self.rows.chosen.get(self.rows.first_at)
            self._before = self.rows
            results = self.rows.results(self._measures)
        self._go_on(results)

    def _go_on(self, results: core.Results | None) -> None:
        """Hand the prefill what it waits for (None: it begins), and take what it asks for next, or the plan."""
        assert self._prefill is not None
        self.lossy = self.lossy or self.held.lossy  # before the prefill may give back what it found
        try:
            asked = next(self._prefill) if results is None else self._prefill.send(results)
            while isinstance(asked, core.Known):
                self.known, asked = asked.logits, self._prefill.send({})
        except StopIteration as stop:
            self.plan = stop.value
            self.rows = self.move = self._before = None
            self.lossy = self.lossy or self.held.lossy
            if not self.reports:
                said = len(self.full_prompt.segments) - len(self.prompt.segments)  # before it was started again
                self.reports = stop.value.reports[: len(stop.value.reports) - said]
            return
        if isinstance(asked, core.Move):
            self.rows, self.move = None, read_move(self, asked)
        elif isinstance(asked, core.Compaction):
            self.rows, self.move = None, read_compaction(self, asked)
        else:
            self.rows, self.move, self._measures = read_pass(self, asked, self._before), None, asked.measures

    def keep(self) -> None:
        """Let the strategy keep what it wants of the generated tokens whose KV exists.

        Those of a compressed prompt were computed on a part of it, and are for nobody else.
        """
        if self.plan is None or self.plan.kept is not None:
            return
        computed = len(self.decoded) - (1 if self.rows is not None and self.rows.left else 0)
        said = np.array(self.decoded[:computed], np.int32)
        self.strategy.finish(self.full_prompt, self.plan, said, self.held)

    def stop(self) -> None:
        if self.phase is not Phase.ENDED:
            self.phase = Phase.WAITING
        if self._prefill is not None:
            self._prefill.close()
        if self.allocation is not None:
            self.allocation.close()
        self.allocation = self.rows = self.move = self.paused = self._prefill = self._before = None
        self.chosen = self.known = None

    def restart(self, notice: str) -> None:
        """Give back what it holds, to be started again; tokens that went out stay. notice: why; empty: to make room."""
        self.stop()
        self.times.stop(time.perf_counter())
        if (self.plan is not None or self.first is not None) and len(self.generated):
            self._exact_before.add(None if self.plan is None else self.plan.exact_to)
        self.plan = self.first = None
        if notice:
            self.restarts += 1
            self.notices.append(notice)
