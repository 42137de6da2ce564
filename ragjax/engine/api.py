"""The engine: a model, its cache and its knowledge behind one Python API.

    engine = Engine.load("smollm2-135m-instruct")
    engine.add_documents([Document("a", "The ferry leaves at nine.")])
    print(engine.answer("When does the ferry leave?").text)

Retrieval and tokenizing happen in the caller's thread (`prepare.py`); the loop's thread owns cache, pool and scheduler.
The whole public API is in this one file, so that a reader finds every method of `Engine` in one place.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ragjax import core
from ragjax.core.cancellation import Cancellation
from ragjax.core.depprompt import DepPrompt, Positions
from ragjax.engine.build import Parts, build
from ragjax.engine.compose import Composer
from ragjax.engine.depkv import DepKV, Keeping, Resumed
from ragjax.engine.front import Front, check_several
from ragjax.engine.inventory import inventory_of
from ragjax.engine.knowledge import Knowledge, check_documents
from ragjax.engine.kv_events import TokenBlock, blocks, places
from ragjax.engine.loop import Loop
from ragjax.engine.prepare import Pending, Preparation
from ragjax.engine.preprocessing import Preparing
from ragjax.engine.replay import Replays
from ragjax.engine.speculation import Pipeline
from ragjax.engine.stats import Stats, passages_of, stats_of
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import AddReport, KnowledgeBase
from ragjax.retrieval.triples import Alias, Triple
from ragjax.reuse import DEPENDENCY
from ragjax.reuse.base import Allocation, Strategy
from ragjax.reuse.fuse import Fuse
from ragjax.schedule.grammar import Grammars
from ragjax.schedule.state import Sink

_log = logging.getLogger(__name__)


class Engine(Front):
    """A model, its cache and its knowledge bases. Use `load`, and `close` when done, or `with`.

    One that is not closed keeps its thread and its memory until the process ends, also if nothing refers to it; then
    it gives a `ResourceWarning`, which Python shows with `-X dev` or `-W default`. Any thread of the process that
    loaded it may call it, but not its own: callbacks of futures run there.
    """

    def __init__(self, parts: Parts, options: core.EngineOptions):
        self.options = options
        self.model_name = parts.model_name
        self.context_length = parts.context_length
        self.identity = parts.identity
        self.tokenizer = parts.tokenizer
        self.top_k = options.top_k
        self._parts = parts
        self.contract, self._runner, self._cache = parts.contract, parts.runner, parts.cache
        self._transfer, self._strategies = parts.transfer, parts.strategies
        replays = Replays(parts.contract)  # like all of the loop it does not refer to the engine, which can be dropped
        self._loop = Loop(parts, options, replays)
        self._opened = ExitStack()
        if parts.supply is not None:
            parts.supply.notify = self._loop.wake
            parts.supply.busy = self._loop.busy
            self._opened.callback(parts.supply.close)
        for part in (parts.disk, parts.shared, parts.transfer):  # the last one is closed first
            if part is not None:
                self._opened.callback(part.close)
        if parts.transfer is not None:
            parts.transfer.notify = self._loop.wake
        if parts.shared is not None:
            parts.shared.listen(self._loop.wake)
        self._guesses = core.Guesses.parse(options.speculate)
        self._loop.requests.max_prefill = self._guesses.max_prefill
        self._preparing: Preparing | None = None
        self._preparers = ThreadPoolExecutor(thread_name_prefix="ragjax-prepare")  # nothing else takes these threads
        config = parts.runner.config
        eos_ids = frozenset(config.eos_ids) | frozenset(parts.tokenizer.eos_ids)
        self._opened.callback(parts.knowledge.close)
        self.knowledge: Knowledge = parts.knowledge
        self.limits = self._loop.limits
        strategies, context = parts.strategies, parts.context_length
        try:
            self.composer = Composer.of(
                options, parts.knowledge, parts.tokenizer, strategies, parts.contract, self.limits, context
            )
            self._preparation = replays.preparation = Preparation(
                self.composer,
                parts.cache,
                config.vocab_size + config.soft_tokens,
                eos_ids,
                Grammars(parts.tokenizer, eos_ids),
                options.lookup,
                parts.compression,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        model: str | Path | core.EngineOptions,
        *,
        strategies: Mapping[str, Strategy] | None = None,
        early: bool = False,
        **options: Any,
    ) -> Engine:
        """Load a model by name or path, compile its programs, and index the knowledge.

        model: a packaged name, a directory, a .gguf file, an adapter of one of these, or a Hugging Face id; or all
        options in one object. strategies: what requests may name (None: all of ragjax's). early: return once the
        programs are there that answer any prompt; while it serves, the others are compiled, and documents read.
        options: fields of `EngineOptions`.
        """
        asked = (
            replace(model, **options) if isinstance(model, core.EngineOptions) else core.EngineOptions(model, **options)
        )
        check_documents(asked)  # before the minute that compiling takes
        engine = cls(build(asked, strategies, early=early), asked)
        try:
            loop = engine._loop
            engine.knowledge.fill(asked, lambda: bool(loop.running or loop.waiting), early=early)
            if asked.preprocess:
                engine.begin_preprocessing()
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def dtype(self) -> str:
        return self._runner.dtype

    def observe_shadows(self, observer: Callable[[str, core.Divergence], None]) -> None:
        """Call `observer` with strategy and divergence of each request replayed, in the engine's thread."""
        self.contract.observer = observer

    @property
    def share_knowledge(self) -> bool:
        return self.options.storage.share_knowledge

    @property
    def closed(self) -> bool:
        return self._loop.closed

    def stats(self) -> Stats:
        figures = stats_of(self._loop, self._parts)
        figures["programs_left"] = self.programs_left
        progress = self.preprocessed()
        return figures if progress is None else figures | passages_of(progress)

    @property
    def programs_left(self) -> int:
        """Programs that are still to be made while requests are served."""
        return 0 if self._parts.supply is None else self._parts.supply.left

    @property
    def starting(self) -> bool:
        """True while programs are made, or steps are measured, for all that the default strategy needs."""
        return bool(self.programs_left) or not self._loop.tuned

    def inventory(self, tenant: str = "", most: int = 200) -> core.Inventory:
        """List a tenant's KV in the cache, its `most` largest nodes, and what of it left and which requests ran lately.

        Tenants see what is their own alone. The tenant "" sees what was computed for no tenant, and how full tiers are.
        """
        return inventory_of(self._loop, self._parts, self.options.storage, tenant, most)

    def kv_blocks(self) -> tuple[dict[int, TokenBlock], int]:
        """Returns the blocks of prefixes that are in memory, by hash, and how many tokens one has."""
        cache = self._parts.cache
        return blocks(self._loop.call(lambda: places(cache.tree)), cache.pool.page_size), cache.pool.page_size

    @property
    def shares(self) -> bool | None:
        """True if the shared cache answers; None: there is none."""
        return None if self._parts.shared is None else self._parts.shared.standing().on

    def add_documents(self, documents: Sequence[core.Document], knowledge: str | None = None) -> AddReport:
        """Add or replace documents by id; the named knowledge base is made if need be."""
        return self.knowledge.bases.make(knowledge).add(documents)

    def delete_documents(self, ids: Sequence[str], knowledge: str | None = None) -> int:
        check_several(ids, "ids")
        return self.knowledge.bases.get(knowledge).delete(ids)

    def search(self, question: str, *, knowledge: str | None = None, top_k: int | None = None) -> tuple[core.Hit, ...]:
        return self.knowledge.bases.get(knowledge).search(question, self.top_k if top_k is None else top_k)

    def document_ids(self, knowledge: str | None = None) -> frozenset[str]:
        return self.knowledge.bases.get(knowledge).document_ids

    def knowledge_base(self, name: str | None = None) -> KnowledgeBase:
        return self.knowledge.bases.get(name)

    def add_triples(self, items: Iterable[Triple | Alias], graph: str | None = None) -> int:
        """Add facts, and other names of entities; the named graph is made if need be. Returns how many are new."""
        return self.knowledge.graphs.make(graph).add(items)

    def knowledge_graph(self, name: str | None = None) -> KnowledgeGraph:
        return self.knowledge.graphs.get(name)

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        """Deltas as they come, then one answer. Closing the iterator cancels at the next pass boundary.

        Cancelled before the first event, preparation ends at the next text that it encodes.

        Raises:
            RequestError: before the first event, if the request cannot be served as asked.
            OverloadError: before the first event, if the queue is full.
        """
        place = self._loop.hold_place()  # before the work of a request that would be refused
        arrival, cancellation = time.perf_counter(), Cancellation()
        sink, events = _queue()
        preparation = self._preparation.checked(cancellation.check)
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._preparers)
        with ExitStack() as ends:
            ends.callback(self._loop.requests.limit.release_place, place)
            ends.callback(cancellation.cancel)  # of effect only if the thread is still at work
            pipeline = Pipeline(self._loop, preparation, request, sink, arrival, self._guesses.stages, place)
            ends.callback(pipeline.close)
            await in_thread(pipeline.run)
            while not isinstance(event := await events.get(), core.Answer):
                if isinstance(event, BaseException):
                    raise event
                yield event
            yield event

    def answer(
        self,
        question: str | Sequence[core.Message],
        *,
        strategy: str | None = None,
        recompute_ratio: float | None = None,
        knowledge: str | None = None,
        top_k: int | None = None,
        documents: Sequence[str | core.Document] | None = None,
        graph: core.Graph | str | None = None,
        compression: core.Compression | str | None = None,
        sampling: core.Sampling | None = None,
        want_logits: bool = False,
        continuation: core.Tokens | None = None,
        tenant: str = "",
        **options: float | int | str | tuple[str, ...] | Mapping[int, float] | None,
    ) -> core.Answer:
        """Answer a question (or continue a chat); `options` are fields of `core.Sampling`, `max_tokens` for instance.

        graph: facts to use instead of chunks; a name stands for all that the graph of this name has to say.
        compression: a short form, "snapkv+graph:512" for instance, or "none" (None: the engine's default).
        """
        check_several(documents, "documents")
        rag = core.Rag(
            knowledge=knowledge,
            top_k=top_k,
            strategy=strategy,
            documents=None if documents is None else tuple(documents),
            recompute_ratio=recompute_ratio,
            graph=core.Graph(graph) if isinstance(graph, str) else graph,
            compression=_compression(compression),
        )
        request = core.Request(
            messages=(core.Message("user", question),) if isinstance(question, str) else tuple(question),
            sampling=replace(sampling or core.Sampling(), **options),  # type: ignore[arg-type]
            rag=rag,
            tenant=tenant,
            want_logits=want_logits,
            continuation=continuation,
        )
        self._loop.check_caller()
        self._loop.check_room()  # before the work of a request that would be refused
        future, sink = _future()
        pipeline = Pipeline(self._loop, self._preparation, request, sink, time.perf_counter(), self._guesses.stages)
        try:
            pipeline.run()
            return future.result()
        finally:
            pipeline.close()  # of effect only if the caller is interrupted

    def answer_prompt(self, prompt: core.Prompt, **options: Any) -> core.Answer:
        """Answer a ready prompt of segments and wait for it; `options` are those of `begin_prompt`."""
        self._loop.check_caller()
        future = self.begin_prompt(prompt, **options)
        try:
            return future.result()
        finally:
            future.cancel()  # of effect only if the caller was interrupted

    def begin_prompt(
        self,
        prompt: core.Prompt,
        *,
        strategy: str | Strategy | None = None,
        recompute_ratio: float | None = None,
        compression: core.Compression | str | None = None,
        sampling: core.Sampling | None = None,
        want_logits: bool = False,
        continuation: core.Tokens | None = None,
        background: bool = False,
        tenant: str = "",
        **options: float | int | str | tuple[str, ...] | Mapping[int, float] | None,
    ) -> Future[core.Answer]:
        """Begin to answer a ready prompt of segments: no retrieval, no template. For notebooks and benchmarks.

        strategy: a name, or one of your own, which has no compression by default. continuation, background: see
        `core.Request`. Cancelling the future cancels the request.
        """
        own = None if isinstance(strategy, str) else strategy
        if own is not None and compression is None:
            compression = "none"
        name = strategy if strategy is None or isinstance(strategy, str) else strategy.name
        request = core.Request(
            sampling=replace(sampling or core.Sampling(), **options),  # type: ignore[arg-type]
            rag=core.Rag(strategy=name, recompute_ratio=recompute_ratio, compression=_compression(compression)),
            tenant=tenant,
            want_logits=want_logits,
            continuation=continuation,
            background=background,
            grounded=core.Grounded(prompt),
        )
        loop = self._loop
        future, sink = _future()
        state = self._preparation.state(request, sink, time.perf_counter(), own)
        future.add_done_callback(lambda done: loop.cancel(state) if done.cancelled() else None)
        loop.enqueue(state)
        return future

    def compute_depkv(
        self, prompt: DepPrompt | core.Prompt, *, positions: Positions = "path", tenant: str = ""
    ) -> DepKV:
        """Compute a prompt under dependency attention, and hold its KV until it is closed (DepCache, section 5)."""
        made = prompt.prompt() if isinstance(prompt, DepPrompt) else prompt
        return self.compute_kv(made, strategy=DEPENDENCY[positions != "path"], tenant=tenant)

    def compute_kv(
        self, prompt: core.Prompt, *, strategy: str, recompute_ratio: float | None = None, tenant: str = ""
    ) -> DepKV:
        """Compute a prompt by any strategy, and hold its KV until it is closed, for many continuations."""
        inner = self.composer.resolve(core.Rag(strategy=strategy, recompute_ratio=recompute_ratio)).strategy
        dressed, loop = inner.dress(prompt), self._loop
        found: list[DepKV] = []

        def release(kv: DepKV) -> None:
            if kv.closed:
                return
            if any(isinstance(one.strategy, Resumed) and one.strategy.kv is kv for one in loop.requests.live):
                raise core.RequestError("the KV is in use: close it when what is generated from it is done", param="kv")
            loop.kept.drop(kv, "the KV was closed")

        def give_back(kv: DepKV) -> None:
            with suppress(core.ClosedError):  # all was given back when the engine was closed
                loop.call(partial(release, kv))

        def keep(plan: core.Plan, allocation: Allocation) -> None:
            if (earlier := loop.kept.get(allocation.label)) is not None:  # of a run that failed after this
                loop.kept.drop(earlier, "the prompt was computed again")
            found.append(DepKV(dressed, strategy, tenant, plan, allocation, allocation.label, give_back))
            loop.kept[allocation.label] = found[-1]

        asked: dict[str, Any] = {"recompute_ratio": recompute_ratio, "max_tokens": 1, "tenant": tenant}
        try:
            answer = self.answer_prompt(prompt, strategy=Keeping(inner, keep), **asked)
        except BaseException:
            for kv in found:
                kv.close()
            raise
        found[-1].timings = answer.timings
        return found[-1]

    def generate_with_depkv(
        self,
        kv: DepKV,
        *,
        sampling: core.Sampling | None = None,
        continuation: core.Tokens | None = None,
        **options: float | int | str | tuple[str, ...] | Mapping[int, float] | None,
    ) -> core.Answer:
        """Generate behind a prompt whose KV is held; nothing of it is computed again. `options` as in `answer`."""
        return self.answer_prompt(
            kv.prompt, strategy=Resumed(kv), sampling=sampling, continuation=continuation, tenant=kv.tenant, **options
        )

    def clear_cache(self) -> None:
        self._loop.call(self._cache.clear)

    def key_of(self, prompt: core.Prompt, strategy: Fuse, tenant: str = "") -> bytes:
        return strategy.key(prompt, self._cache, tenant)

    def noted(self, key: bytes) -> bytes | None:
        """The note that a strategy keeps with the KV of this key; None if neither the cache nor the disk has it."""
        return self._cache.find_meta(key)

    def write_soon(self, prompts: Sequence[core.Prompt], strategy: Strategy, tenant: str = "") -> None:
        """Write the KV that a strategy uses and keeps of prompts to disk in idle time, if there is a disk tier."""

        def write() -> None:  # keys are those of the tree as it is, which is the loop's
            self._cache.write_soon({key for prompt in prompts for key in strategy.keys(prompt, self._cache, tenant)})

        self._loop.call(write)

    def preprocessing_room(self, tenant: str = "") -> int:
        """Pages of KV of a tenant that may be computed ahead without driving out what was computed before."""
        return self._cache.room(tenant)

    @property
    def pending(self) -> Pending:
        return self._preparation.pending

    def begin_preprocessing(self) -> None:
        """Prepare the chunks of all knowledge bases from now on, while no request runs (`EngineOptions.preprocess`)."""
        self._preparing = self._preparing or Preparing(self)

    def preprocessed(self, tenants: bool = True) -> core.Preprocessed | None:
        """Progress of the preprocessing; None if there is none. tenants: count their own passages, too."""
        return None if self._preparing is None else self._preparing.progress(tenants)

    def vacate_device(self) -> None:
        self._loop.call(self._cache.vacate)

    def close(self) -> None:
        """Stop: running requests end with an error. Safe to call twice, and again if a call was interrupted."""
        self._loop.close()
        if self._preparing is not None:
            self._preparing.close()
        self._preparers.shutdown(wait=False, cancel_futures=True)
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:  # the module may be gone at the end
        loop = getattr(self, "_loop", None)
        if loop is not None and loop.left_open:
            told = f"the engine of {self.model_name!r} was not closed: call close when done, or use it in a with block"
            _warn(told, ResourceWarning, source=self)


def _compression(given: core.Compression | str | None) -> core.Compression | Literal["none"] | None:
    return core.Compression.asked(given) if isinstance(given, str) else given


def _queue() -> tuple[Sink, asyncio.Queue[core.Event | BaseException]]:
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[core.Event | BaseException] = asyncio.Queue()

    def sink(event: core.Event | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:  # the client's loop is gone; the request ends by itself
            _log.debug("event dropped: the event loop is closed")

    return sink, events


def _future() -> tuple[Future[core.Answer], Sink]:
    future: Future[core.Answer] = Future()

    def sink(event: core.Event | BaseException) -> None:
        with suppress(InvalidStateError):  # it was cancelled meanwhile
            if isinstance(event, BaseException):
                future.set_exception(event)
            elif isinstance(event, core.Answer):
                future.set_result(event)

    return future, sink
