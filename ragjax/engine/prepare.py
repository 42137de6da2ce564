"""From a request to its state, in the caller's thread: retrieval, the prompt, the strategy, and what is too long."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ragjax.cache.pool import PagePool
from ragjax.core import (
    Composed,
    Compression,
    Graph,
    Hit,
    Kind,
    Prompt,
    Rag,
    Request,
    RequestError,
    StepLimits,
    Tokens,
)
from ragjax.engine.grounding import BROUGHT, Grounding, overlong
from ragjax.engine.registry import Registry
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting import chat, facts, tools
from ragjax.prompting.recognition import Recognition
from ragjax.quality.contract import Contract
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import SearchStage
from ragjax.reuse import DEPENDENCY, compaction
from ragjax.reuse.base import Strategy
from ragjax.reuse.packet import NAME as PACKET
from ragjax.reuse.prefix import Prefix
from ragjax.schedule.generation import Generation
from ragjax.schedule.grammar import Constraint, Grammars
from ragjax.schedule.lookup import Lookup
from ragjax.schedule.sampling import Sampler
from ragjax.schedule.state import RequestState, Sink, Times

PATH_CHARS = 64
"""Characters of given relation paths for each token of the context, at most: all are encoded to see how many fit."""


MOST_COMPRESSIONS = 32
"""Compressions that an engine compiles programs for, at most: each new one makes all requests wait."""

MOST_OF_TENANT = 8
"""Of these, what one tenant may bring, so that no tenant uses up what there is for all."""


class Compressions:
    """What an engine has compiled, or will, and the tenant that asked for it first. Any thread may call it."""

    def __init__(self) -> None:
        self._known: dict[Compression, str] = {}
        self._lock = threading.Lock()

    def take(self, compression: Compression, tenant: str) -> None:
        """Note that this one is asked for.

        Raises:
            RequestError: if it is one too many for the engine or the tenant. It names the tenant's own ones alone.
        """
        with self._lock:
            if compression.program in self._known:
                return
            own = [str(known) for known, owner in self._known.items() if owner == tenant]
            most = MOST_OF_TENANT if tenant else MOST_COMPRESSIONS
            if len(own) < most and len(self._known) < MOST_COMPRESSIONS:
                self._known[compression.program] = tenant
                return
        known = ", ".join(dict.fromkeys(own)) or "none"
        raise RequestError(
            f"compression: {compression} takes a program of its own, and this server has compiled as many as it may: "
            f"{MOST_COMPRESSIONS} for all, {MOST_OF_TENANT} for a tenant. What you asked for before serves budgets "
            f"from half of its own on, with its window and graph: {known}",
            param="rag.compression",
            code="invalid_value",
        )


@dataclass(frozen=True)
class Preparation:
    """What requests are prepared with. Any thread may call it.

    context_length: most tokens of a prompt and its answer. vocabulary: one past the highest id that the model reads.
    limits: what one step can read. pool: pages of the device.
    eos_ids: tokens that end an answer. grammars: reads those that answers follow.
    recognise: whether passages in messages of requests that say nothing else are recognised.
    lookup: tokens that prompt lookup proposes in a step. compression: of prompts whose requests say nothing else.
    compressions: all that were asked for. check: called at each step of a loop over what
    a request brings; an error of it ends the work.
    """

    tokenizer: Tokenizer
    grounding: Grounding
    graphs: Registry[KnowledgeGraph]
    strategies: Mapping[str, Strategy]
    contract: Contract
    limits: StepLimits
    pool: PagePool
    context_length: int
    vocabulary: int
    eos_ids: frozenset[int]
    grammars: Grammars
    recognise: bool = False
    lookup: int = 0
    compression: Compression | None = None
    compressions: Compressions = field(default_factory=Compressions)
    check: Callable[[], None] = lambda: None
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def checked(self, check: Callable[[], None]) -> Preparation:
        """The same with another `check`."""
        tokenizer, grounding = self.tokenizer.checked(check), self.grounding.checked(check)
        return replace(self, tokenizer=tokenizer, grounding=grounding, check=check)

    def prepare(self, request: Request, sink: Sink, arrival: float) -> RequestState:
        """A request's state, ready to be served; its events go to `sink`. arrival: `time.perf_counter()` seconds.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        return self.admit(self.compose(request), sink, arrival)

    def compose(self, request: Request) -> Composed:
        """A request with its prompt: all that comes before its state, and needs no device.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        self._check_texts(request)
        if request.prompt is not None:
            build = partial(chat.text_prompt, self.tokenizer, request.prompt)
            return Composed(request, self._recognised(request, build))
        if request.rag is not None and request.rag.graph is not None:
            return self._compose_graph(request, request.rag, request.rag.graph)
        began = time.perf_counter()
        hits = self.grounding.hits(request)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        notices = (BROUGHT,) if hits is None and self.grounding.leaves_alone(request) else ()
        return Composed(request, self._prompt(request, hits), notices=notices, retrieve_ms=retrieve_ms)

    def admit(self, made: Composed, sink: Sink, arrival: float) -> RequestState:
        """The state of a request whose prompt is made.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        rag = made.request.rag or Rag()
        strategy = None if made.strategy is None else self._resolve(replace(rag, strategy=made.strategy))[0]
        state = self.state(made.prompt, made.request, sink, Times(arrival, retrieve_ms=made.retrieve_ms), strategy)
        state.facts = made.facts
        state.notices += made.notices
        return state

    def serving(self, made: Composed) -> Strategy:
        """The strategy that will serve a request.

        Raises:
            RequestError: if none can serve it as asked.
        """
        rag = made.request.rag or Rag()
        if made.strategy is not None:
            return self._resolve(replace(rag, strategy=made.strategy))[0]
        return self._choose(rag, made.prompt)[0]

    def search(self, request: Request, stages: int) -> Iterator[SearchStage] | None:
        """The search for a request's chunks in stages; None if it needs none, or its strategy's answers depend on it.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        self._check_texts(request)
        strategy = self.strategies.get(self.strategy_of(request.rag))
        if strategy is None or not strategy.steady:
            return None
        return self.grounding.stages(request, stages)

    def ground(self, request: Request, hits: tuple[Hit, ...] | None, sink: Sink, times: Times) -> RequestState:
        """The state of a request with these chunks of its knowledge base, or with given documents.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        return self.state(self._prompt(request, hits), request, sink, times)

    def _prompt(self, request: Request, hits: tuple[Hit, ...] | None) -> Prompt:
        build = partial(
            chat.chat_prompt, self.tokenizer, request.messages, hits, public=self.grounding.share, tools=request.tools
        )
        return self._recognised(request, build)

    def _recognised(self, request: Request, build: Callable[..., Prompt]) -> Prompt:
        """The prompt that `build` makes, with passages recognised if that is asked for.

        Raises:
            RequestError: if a request asks for it that names no strategy, and a budget picks one.
        """
        rag = request.rag or Rag()
        if not (self.recognise if rag.recognise is None else rag.recognise):
            return build()
        if rag.strategy is None and self.contract.budgeted:
            reason = "the server's quality budget holds for retrieved chunks alone: name a strategy to recognise others"
            raise RequestError(reason, param="rag.recognise", code="invalid_value")
        entries = self.limits.room_beside(self.context_length, 0)
        recognition = Recognition(
            self.grounding.cutter, max(0, entries // 4 - 2)
        )  # two pieces each, of two entries beside theirs
        prompt = build(recognition=recognition)
        strategy, _ = self._resolve(rag, prompt.preprocessed)
        return build(recognition=replace(recognition, exact=True)) if strategy.exact else prompt

    def state(
        self, prompt: Prompt, request: Request, sink: Sink, times: Times, strategy: Strategy | None = None
    ) -> RequestState:
        """The state of a request whose prompt is made. strategy: to serve it by, whatever the request names.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        rag = request.rag or Rag()
        self._check_tokens(prompt, request)
        if strategy is not None:
            self._check_ratio(rag, strategy)
        strategy, ratio, notice = (strategy, rag.recompute_ratio, None) if strategy else self._choose(rag, prompt)
        plain, prompt = prompt, strategy.dress(prompt)
        room, raw = self.context_length - len(prompt), request.prompt is not None
        self._check_bias(request)
        generation = Generation(request.sampling, self.tokenizer, self.eos_ids, room, continued=raw)
        name = f"request-{next(self._numbers)}"
        compression = self._compression(request, strategy)
        state = RequestState(name, request, prompt, plain, strategy, ratio, compression, generation, sink, times)
        state.sampler = Sampler(request.sampling, plain.tokens, self._constraint(request))
        state.notices += [] if notice is None else [notice]
        if self.lookup:
            state.lookup = Lookup(self.lookup)
        self._check_length(state)
        if compression is not None and state.compresses and compression != self.compression:
            self.compressions.take(compression, request.tenant)  # last: a request that is refused compiles none
        if not request.background and self.contract.draws():
            state.shadowed = []
        return state

    def _compression(self, request: Request, strategy: Strategy) -> Compression | None:
        """How the request's prompt is compressed; those in the background are not, unless they say so."""
        given = None if request.rag is None else request.rag.compression
        if given == "none" or (given is None and request.background):
            return None
        chosen = self.compression if given is None else given
        if chosen is not None:
            compaction.check(chosen, strategy)
        return chosen

    def _constraint(self, request: Request) -> Constraint | None:
        """What the answer has to follow."""
        asked = tools.grammar(request, self.tokenizer.knows_tools)
        return None if asked is None else self.grammars.constraint(*asked)

    def _check_bias(self, request: Request) -> None:
        unknown = [token for token in request.sampling.logit_bias if not self.tokenizer.has_token(token)]
        if unknown:
            reason = f"logit_bias: the model has no token {unknown[0]}; its highest is {self.tokenizer.vocab_size - 1}"
            raise RequestError(reason, param="logit_bias", code="invalid_value")

    def strategy_of(self, rag: Rag | None) -> str:
        """Name of the strategy that serves a request, as it says or leaves open."""
        if rag is not None and rag.strategy is not None:
            return rag.strategy
        if rag is None or rag.graph is None or self.contract.faulted:
            return self.contract.setting.strategy
        return DEPENDENCY[0]

    def _compose_graph(self, request: Request, rag: Rag, asked: Graph) -> Composed:
        began = time.perf_counter()
        if not request.messages:
            raise RequestError("a graph needs messages", param="rag.graph")
        self._check_paths(asked.relation_paths or ())
        graph = None if asked.relation_paths is not None else self.graphs.get(asked.name)
        strategy, _ = self._resolve(replace(rag, strategy=self.strategy_of(rag)))
        build = partial(
            chat.graph_prompt, self.tokenizer, request.messages, trees=strategy.name in DEPENDENCY,
            public=self.grounding.share, share=self.grounding.share and asked.relation_paths is None,
            tools=request.tools,
        )  # fmt: skip
        room = self.context_length - min(request.sampling.max_tokens, self.context_length // 2)
        grounded = facts.ground(facts.gather(graph, asked, request.question, self.check), build, room)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        return Composed(
            request, grounded.prompt, strategy.name, grounded.facts, tuple(grounded.notices), retrieve_ms=retrieve_ms
        )

    # --------------------------------------------------------------------------------------- strategy

    def _choose(self, rag: Rag, prompt: Prompt) -> tuple[Strategy, float | None, str | None]:
        """What serves a request, the recompute ratio, and what its answer has to say of a budget of its own.

        Raises:
            RequestError: if none can serve it as asked.
        """
        strategy, ratio = self._resolve(rag, prompt.preprocessed)
        exceeded = None if rag.strategy is not None or strategy.exact else self.contract.exceeded(prompt.chunks)
        if exceeded is None:
            return strategy, ratio, None
        return Prefix(), None, f"{exceeded}: the request ran prefix, which is exact"

    def _resolve(self, rag: Rag, preprocessed: bool = True) -> tuple[Strategy, float | None]:
        """What serves a request, and the recompute ratio. preprocessed: whether all its chunks are."""
        default = self.contract.setting_of(preprocessed)
        strategy = self.strategies.get(default.strategy if rag.strategy is None else rag.strategy)
        if strategy is None:
            if rag.strategy == PACKET:
                reason = "the model has no packets: start the server with an adapter of python -m train.packet"
                raise RequestError(reason, param="rag.strategy", code="invalid_value")
            known = ", ".join(self.strategies)
            raise RequestError(f"unknown strategy {rag.strategy!r}; choose one of {known}", param="rag.strategy")
        self._check_ratio(rag, strategy)
        if rag.recompute_ratio is None and strategy.name == default.strategy:
            return strategy, default.ratio
        return strategy, rag.recompute_ratio

    def _check_ratio(self, rag: Rag, strategy: Strategy) -> None:
        if rag.recompute_ratio is None or strategy.selective:
            return
        selective = ", ".join(name for name, other in self.strategies.items() if other.selective) or "none"
        raise RequestError(
            f"the strategy {strategy.name} takes no recompute_ratio; these do: {selective}",
            param="rag.recompute_ratio",
            code="invalid_value",
        )

    # ----------------------------------------------------------------------------------------- tokens

    def _check_tokens(self, prompt: Prompt, request: Request) -> None:
        """Refuse ids that the model has no embedding of: they would give NaN, or what another token gives."""
        if any(np.ndim(segment.tokens) != 1 for segment in prompt.segments):
            raise _wrong_tokens("give the tokens of each segment of the prompt as one row, an array [n]", "prompt")
        self._check_ids(prompt.tokens, "prompt")
        if request.continuation is None:
            return
        if np.ndim(request.continuation) != 1:
            raise _wrong_tokens("give the tokens of the continuation as one row, an array [n]", "continuation")
        self._check_ids(np.asarray(request.continuation), "continuation")

    def _check_ids(self, tokens: Tokens, param: str) -> None:
        if not len(tokens):
            return
        if not np.issubdtype(tokens.dtype, np.integer):
            raise _wrong_tokens(f"the tokens of the {param} must be whole numbers, not {tokens.dtype}", param)
        unknown = next((end for end in (tokens.min(), tokens.max()) if not 0 <= end < self.vocabulary), None)
        if unknown is not None:
            known = f"its highest is {self.vocabulary - 1}"
            raise _wrong_tokens(f"the model has no token {unknown}, which is in the {param}; {known}", param)

    # ---------------------------------------------------------------------------------------- lengths

    def _check_paths(self, paths: Sequence[Sequence[str]]) -> None:
        given, most = sum(len(step) for path in paths for step in path), PATH_CHARS * self.context_length
        if given > most:
            raise _too_long(
                f"the relation paths have {given} characters; the context takes up to {most}. Give fewer paths",
                "rag.graph.relation_paths",
            )

    def _check_texts(self, request: Request) -> None:
        """Refuse what is clearly too long before all of it is encoded."""
        if isinstance(request.prompt, str) and self.grounding.chunker.exceeds(request.prompt, 2 * self.context_length):
            raise overlong(self.context_length, "prompt has", "Shorten it", "prompt")
        # a template may leave out the reasoning of earlier answers
        texts = (text for m in request.messages for text in (m.content, *(call.arguments for call in m.tool_calls)))
        listed = () if request.tools is None else request.tools.offered
        said = "\n".join((*texts, *(f"{tool.description}{tool.parameters}" for tool in listed)))
        if self.grounding.chunker.exceeds(said, 4 * self.context_length):
            raise overlong(self.context_length, "messages have", "Shorten them", "messages")

    def _check_length(self, state: RequestState) -> None:
        prompt, raw = state.prompt, state.request.prompt is not None
        param = "prompt" if raw else "messages"
        if len(prompt) + 1 > self.context_length:
            raise _too_long(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context_length}, answer included. "
                f"Shorten {'it' if raw else 'the messages, or retrieve fewer chunks'}",
                param,
            )
        needed = len(prompt) + state.decode_tokens
        if needed > self.context_length:
            raise RequestError("prompt and continuation exceed the context", param="continuation")
        pages = self.pool.pages_for(len(prompt) + state.decode_tokens)
        if pages > self.pool.capacity:
            raise _too_long(
                f"the request needs {pages} pages of KV; the device cache has {self.pool.capacity}. "
                "Shorten the prompt, lower max_tokens, or give the device cache more memory",
                param,
            )
        # branches of a tree lie together; a strategy reads no more of them than a step can
        pieces = sum(segment.kind is not Kind.NODE for segment in prompt.segments)
        if state.compression is not None:  # its last rows are computed once more, beside all that there is
            needed, pieces = needed + state.compression.window, pieces + 1
        if not self.limits.holds(needed, pieces):
            raise _too_long(
                f"the prompt has {pieces} passages, each with KV of its own, and {needed} tokens with the answer: more "
                "than attention can read at a time. Give or retrieve fewer passages, or lower max_tokens",
                param,
            )


def _wrong_tokens(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")


def _too_long(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="context_length_exceeded")
