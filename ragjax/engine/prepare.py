"""From a request to its state, in the caller's thread: prompt, strategy, sampling, and what is too long."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Compression, Kind, Prompt, Rag, Request, RequestError, Tokens, invalid
from ragjax.engine.compose import Composer, ServedBy
from ragjax.engine.grounding import too_long
from ragjax.prompting import tools
from ragjax.quality.contract import AUTO
from ragjax.quality.report import PREFIX
from ragjax.reuse import compaction
from ragjax.reuse.base import Strategy
from ragjax.reuse.fusion import without_lost
from ragjax.schedule.generation import AnswerText
from ragjax.schedule.grammar import Grammars
from ragjax.schedule.lookup import Lookup
from ragjax.schedule.sampling import Sampler
from ragjax.schedule.state import RequestState, Sink, Times

MOST_COMPRESSIONS = 32
"""Compressions that an engine compiles programs for, at most: each new one makes all requests wait."""

MOST_OF_TENANT = 8
"""Of these, what one tenant may bring, so that no tenant uses up what there is for all."""


class Compressions:
    """Compressions that an engine has compiled, or will, and the tenant that asked first. Any thread may call it."""

    def __init__(self) -> None:
        self._known: dict[Compression, str] = {}
        self._lock = threading.Lock()

    def take(self, compression: Compression, tenant: str) -> None:
        """Note that this one is asked for; RequestError: one too many. It names the tenant's own ones alone."""
        with self._lock:
            if compression.program in self._known:
                return
            own = [str(known) for known, owner in self._known.items() if owner == tenant]
            most = MOST_OF_TENANT if tenant else MOST_COMPRESSIONS
            if len(own) < most and len(self._known) < MOST_COMPRESSIONS:
                self._known[compression.program] = tenant
                return
        raise invalid(
            "rag.compression",
            f"compression: {compression} takes a program of its own, and this server has compiled as many as it may: "
            f"{MOST_COMPRESSIONS} for all, {MOST_OF_TENANT} for a tenant. What you asked for before serves budgets "
            f"from half of its own on, with its window and graph: {', '.join(dict.fromkeys(own)) or 'none'}",
        )


@dataclass
class Pending:
    """Chunks that idle time is still to preprocess: those of prompts that begin with these tokens (None: none are)."""

    head: Tokens | None = None

    def holds(self, prompt: Prompt) -> bool:
        head = self.head
        if head is None or not np.array_equal(prompt.segments[0].tokens, head):
            return False
        return any(one.kind is Kind.CHUNK and not one.behind for one in prompt.segments)


@dataclass(frozen=True)
class Preparation:
    """Prepares requests: grounding, checks, strategy, and the state. Any thread may call it."""

    composer: Composer
    cache: KnowledgeCache
    vocabulary: int  # one past the highest id that the model reads
    eos_ids: frozenset[int]  # tokens that end an answer
    grammars: Grammars  # reads those that answers follow
    lookup: int = 0  # tokens that prompt lookup proposes in a step
    compression: Compression | None = None  # of prompts whose requests say nothing of it
    compressions: Compressions = field(default_factory=Compressions)  # all that were asked for
    pending: Pending = field(default_factory=Pending)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def checked(self, check: Callable[[], None]) -> Preparation:
        """The same; `check` is called at each step of a loop over what a request brings, and may raise to end it."""
        return replace(self, composer=self.composer.checked(check))

    def state(self, request: Request, sink: Sink, arrival: float, strategy: Strategy | None = None) -> RequestState:
        """The state of a request, ready to be served; it is grounded first if need be.

        arrival: `time.perf_counter()` seconds. strategy: serves it, whatever the request names.
        """
        made = request.grounded or self.composer.ground(request)
        if request.echo and len(made.prompt) > 1:  # all but its first token is scored, and none of it reused
            tokens = made.prompt.tokens
            first = replace(made.prompt.segments[0], tokens=tokens[:1])
            made, request = replace(made, prompt=Prompt((first,))), replace(request, continuation=tokens[1:])
        if strategy is None:  # a mark is of the past: KV may have been evicted since
            made = replace(made, prompt=without_lost(made.prompt, self.cache, request.tenant))
        plain, rag = made.prompt, request.rag or Rag()
        self._check_tokens(plain, request)
        left = strategy is None and rag.strategy in (None, AUTO)
        if strategy is None:
            chosen = self.composer.choose(rag, made)
            prefix, name = self.composer.strategies.get(PREFIX.strategy), chosen.strategy.name
            waits = chosen.strategy.preprocessed and rag.documents is None and self.pending.holds(plain)
            if prefix is not None and waits:
                told = f"passages for {name} are still being prepared: the request ran prefix, which is exact"
                chosen = ServedBy(prefix, notice=told)
        else:
            self.composer.check_ratio(rag, strategy)
            chosen = ServedBy(strategy, rag.recompute_ratio)
        strategy, ratio = chosen.strategy, chosen.ratio
        prompt = strategy.dress(plain)
        tokenizer = self.composer.tokenizer
        unknown = [token for token in request.sampling.logit_bias if not tokenizer.has_token(token)]
        if unknown:
            reason = f"logit_bias: the model has no token {unknown[0]}; its highest is {tokenizer.vocab_size - 1}"
            raise invalid("logit_bias", reason)
        generation = AnswerText(
            request.sampling, tokenizer, self.eos_ids, self._room(request, prompt), continued=request.continues,
            shown=tools.shown(request, tokenizer),
        )  # fmt: skip
        compression = self._compression(request, strategy)
        name = f"request-{next(self._numbers)}"
        times = Times(arrival - made.spent_ms / 1e3, retrieve_ms=made.retrieve_ms)
        state = RequestState(name, request, prompt, plain, strategy, ratio, compression, generation, sink, times)
        state.by_default, state.picked = left, chosen.picked
        grammar = tools.grammar(request, tokenizer)
        constraint = None if grammar is None else self.grammars.constraint(*grammar, tenant=request.tenant)
        state.sampler = Sampler(request.sampling, plain.tokens, constraint)
        state.facts, state.sources, state.kept = made.facts, made.sources, made.kept
        state.notices += [*filter(None, [chosen.notice]), *made.notices]
        state.notices += [] if constraint is None else constraint.notices
        if self.lookup:
            state.lookup = Lookup(self.lookup)
        self._check_length(state)
        if compression is not None and state.compresses and compression != self.compression:
            self.compressions.take(compression, request.tenant)  # last: a request that is refused compiles none
        if not request.background and self.composer.contract.draws(chosen.picked):
            state.shadowed = []
        return state

    def _room(self, request: Request, prompt: Prompt) -> int:
        """Tokens that fit behind a prompt; half of the free pages at most where the request does not say how many."""
        room = self.composer.context_length - len(prompt)
        if request.sampling.max_tokens is not None:
            return room
        pool, limits = self.cache.pool, self.composer.limits
        pages = min(pool.capacity - pool.pages_for(len(prompt)), limits.room_beside(len(prompt), len(prompt.segments)))
        return min(room, max(request.sampling.room, pages * limits.page_size // 2))

    def _compression(self, request: Request, strategy: Strategy) -> Compression | None:
        given = None if request.rag is None else request.rag.compression
        if given == "none" or (given is None and request.background):
            return None
        chosen = self.compression if given is None else given
        if chosen is not None:
            compaction.check(chosen, strategy)
        return chosen

    def _check_tokens(self, prompt: Prompt, request: Request) -> None:
        """Refuse ids that the model has no embedding of: they would give NaN, or what another token gives."""
        given = [("prompt", segment.tokens) for segment in prompt.segments]
        if request.continuation is not None:
            given.append(("continuation", request.continuation))
        for param, tokens in ((param, np.asarray(tokens)) for param, tokens in given):
            if tokens.ndim != 1:
                raise invalid(param, f"give the tokens of the {param} as one row, an array [n]")
            if len(tokens) and not np.issubdtype(tokens.dtype, np.integer):
                raise invalid(param, f"the tokens of the {param} must be whole numbers, not {tokens.dtype}")
            unknown = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
            if len(unknown):
                highest = f"its highest is {self.vocabulary - 1}"
                raise invalid(param, f"the model has no token {unknown[0]}, which is in the {param}; {highest}")

    def _check_length(self, state: RequestState) -> None:
        prompt, raw = state.prompt, state.request.prompt is not None
        context, param = self.composer.context_length, "prompt" if raw else "messages"
        if len(prompt) + 1 > context:
            raise too_long(
                f"the prompt has {len(prompt)} tokens; the context holds {context}, answer included. "
                f"Shorten {'it' if raw else 'the messages, or retrieve fewer chunks'}",
                param,
            )
        needed = len(prompt) + state.decode_tokens
        if needed > context:
            raise RequestError("prompt and continuation exceed the context", param="continuation")
        pages = self.cache.pool.pages_for(len(prompt) + state.decode_tokens)
        if pages > self.cache.pool.capacity:
            raise too_long(
                f"the request needs {pages} pages of KV; the device cache has {self.cache.pool.capacity}. "
                "Shorten the prompt, lower max_tokens, or give the device cache more memory",
                param,
            )
        # branches of a tree lie together; a strategy reads no more of them than a step can
        pieces = sum(segment.kind is not Kind.NODE for segment in prompt.segments)
        if state.compression is not None:  # its last rows are computed once more, beside all that there is
            needed, pieces = needed + state.compression.window, pieces + 1
        if not self.composer.limits.holds(needed, pieces):
            raise too_long(
                f"the prompt has {pieces} passages, each with KV of its own, and {needed} tokens with the answer: more "
                "than attention can read at a time. Give or retrieve fewer passages, or lower max_tokens",
                param,
            )
