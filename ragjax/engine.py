"""The engine: one loop that admits, steps and cancels requests at pass boundaries, and the Python API.

    engine = Engine.load("smollm2-135m-instruct")
    engine.add_documents([Document("a", "The ferry leaves at nine.")])
    print(engine.answer("When does the ferry leave?").text)

Retrieval and tokenising happen in the caller's thread; one engine thread owns cache, pool and scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragjax import fact
from ragjax import prompt as prompts
from ragjax.cache.cache import KnowledgeCache
from ragjax.core import (
    Answer,
    ConfigError,
    Delta,
    Divergence,
    Document,
    Event,
    Graph,
    Hit,
    Kind,
    Message,
    OutOfPages,
    OverloadError,
    Plan,
    Prompt,
    Rag,
    Request,
    RequestError,
    Sampling,
    SegmentReport,
    StorageOptions,
    Timings,
    Tokens,
)
from ragjax.dependency import DepPrompt, Positions
from ragjax.depkv import DepKV, Keeping, Resumed
from ragjax.generation import Generation
from ragjax.models.tokenizer import Tokenizer
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import AddReport, KnowledgeBase
from ragjax.reuse import DEPENDENCY
from ragjax.reuse.base import Holding, Strategy
from ragjax.reuse.contract import QUEUE, STEPS, Contract
from ragjax.reuse.full import Full
from ragjax.reuse.quality import Setting, divergence
from ragjax.runner import Runner
from ragjax.scheduler import Batch, Scheduler, Task
from ragjax.store.disk import DiskStore
from ragjax.store.mover import Mover
from ragjax.ticket import RESTARTS, Counters, Sink, Ticket
from ragjax.trace import Recorder

if TYPE_CHECKING:
    from ragjax.retrieval.graph import Imported, KnowledgeGraph
    from ragjax.retrieval.path import Triple
    from ragjax.retrieval.triples import Alias

_log = logging.getLogger(__name__)

TEND_STEPS = 64
"""Steps after which hot nodes are copied to the tiers below even though requests are running."""

BACKGROUND = 8
"""Background requests that run at a time."""

TICK = 0.02
"""Seconds between two looks at whether a load takes too long, while there is nothing else to do."""


class Engine:
    """A model, its cache and its knowledge bases. Use `load`; `close` when done (or as a context manager)."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        cache: KnowledgeCache,
        *,
        model_name: str,
        context_length: int,
        strategies: dict[str, Strategy],
        default_strategy: str,
        max_queue: int = 64,
        top_k: int = 3,
        chunker: Chunker,
        open_knowledge: Callable[[str], KnowledgeBase],
        open_graph: Callable[[str], KnowledgeGraph] | None = None,
        mover: Mover | None = None,
        disk: DiskStore | None = None,
        load_timeout: float = 10.0,
        share_knowledge: bool = False,
        recorder: Recorder | None = None,
        contract: Contract | None = None,
        identity: bytes = b"",
    ):
        if default_strategy not in strategies:
            raise ConfigError(f"unknown strategy {default_strategy!r}; choose one of {', '.join(strategies)}")
        self.model_name = model_name
        self.context_length = context_length
        self._contract = contract or Contract(Setting(default_strategy), runner.dtype)
        self.identity = identity  # digest of what KV depends on besides tokens
        self._shadows = 0
        self.tokenizer = tokenizer
        self.top_k = top_k
        self._runner = runner
        self._cache = cache
        self._mover = mover
        self._disk = disk
        self._load_timeout = load_timeout
        self._share = share_knowledge
        self._recorder = recorder
        self._strategies = strategies
        self._knowledge: dict[str, KnowledgeBase] = {}
        self._chunker = chunker
        self._open_knowledge = open_knowledge
        self._graphs: dict[str, KnowledgeGraph] = {}
        self._kept: dict[str, DepKV] = {}
        self._open_graph = open_graph
        self._max_queue = max_queue
        self._scheduler = Scheduler(runner.grid, runner.page_size)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._background: deque[Ticket] = deque()
        self._resting: list[Task] = []
        self._tickets: dict[int, Ticket] = {}
        self._pending = 0
        self._lock = threading.Lock()
        self._counters = Counters()
        self._numbers = itertools.count(1)
        self._closed = False
        self._blocked = False
        if mover is not None:
            mover.notify = self._wake
        self._thread = threading.Thread(target=self._loop, name="ragjax-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        knowledge: str | Path | Mapping[str, str | Path] | None = None,
        strategy: str | None = None,
        recompute_ratio: float | None = None,
        quality_budget: str | None = None,
        quality_fallback: str = "refuse",
        shadow_rate: float = 0.0,
        dtype: str = "bfloat16",
        top_k: int = 3,
        device_cache_gb: float = 0.5,
        max_queue: int = 64,
        max_context: int | None = None,
        index: str = "flat",
        index_dir: str | Path | None = None,
        progress: bool = True,
        compile: bool = True,
        strategies: dict[str, Strategy] | None = None,
        storage: StorageOptions | None = None,
        record_trace: str | Path | None = None,
        graph: str | Path | Mapping[str, str | Path] | None = None,
        graph_dir: str | Path | None = None,
    ) -> Engine:
        """Load a model by name or path, compile its programs, and index the knowledge.

        Args:
            model: a packaged name, a directory, a .gguf file, an adapter of one of these, or a Hugging Face id.
            knowledge: a folder or JSONL file, or several by name; the first is the default one.
            strategy: reuse strategy of requests that name none ("prefix", if None and there is no budget).
            recompute_ratio: its share of recomputed chunk tokens, if it is selective (its own choice, if None).
            quality_budget: "KL=0.05" and the like: requests that name no strategy get the cheapest setting inside,
                by the report that `python -m ragjax.reuse.gate` made of this model.
            quality_fallback: what to do if none is inside: "refuse" to load, or run "full".
            shadow_rate: share of requests that are replayed in `full`, when nothing else runs, and compared.
            dtype: "bfloat16" or "float32", of weights and KV.
            top_k: chunks retrieved for requests that say nothing else.
            device_cache_gb: size of the page pool.
            max_queue: requests that may wait.
            max_context: longest prompt and answer together (the model's context length, if None).
            index: "flat", "ivf" or "hnsw".
            index_dir: where chunks and index are kept; in memory if None.
            progress: show progress bars.
            compile: compile all programs now, so that no request waits for one; False for short experiments.
            strategies: what requests may name (all of ragjax's, if None).
            storage: the replacement policy, and the tiers below the device (LRU and none, if None).
            record_trace: file to which every request is added, as hashes and sizes (`ragjax.trace`).
            graph: triples in a .tsv, .jsonl or .nt file, or several by name; the first is the default graph.
            graph_dir: where graphs are kept between starts; in memory if None.

        Raises:
            ConfigError: saying what to change.
        """
        from ragjax.loading import load_engine  # the parts that a bare machine may lack are imported there

        return load_engine(
            model,
            knowledge=knowledge,
            strategy=strategy,
            recompute_ratio=recompute_ratio,
            quality_budget=quality_budget,
            quality_fallback=quality_fallback,
            shadow_rate=shadow_rate,
            dtype=dtype,
            top_k=top_k,
            device_cache_gb=device_cache_gb,
            max_queue=max_queue,
            max_context=max_context,
            index=index,
            index_dir=index_dir,
            progress=progress,
            compile=compile,
            strategies=strategies,
            storage=storage or StorageOptions(),
            record_trace=record_trace,
            graph=graph,
            graph_dir=graph_dir,
        )

    # ------------------------------------------------------------------------------------ what it is

    @property
    def dtype(self) -> str:
        """Dtype of weights and KV."""
        return self._runner.dtype

    @property
    def default_setting(self) -> Setting:
        """Strategy and recompute ratio of requests that name no strategy; shadow replay may change it."""
        return self._contract.setting

    @property
    def default_strategy(self) -> str:
        """Its strategy."""
        return self._contract.setting.strategy

    def strategy_of(self, rag: Rag | None) -> str:
        """Name of the strategy that serves a request, as it says or leaves open."""
        if rag is not None and rag.strategy is not None:
            return rag.strategy
        return self.default_strategy if rag is None or rag.graph is None else DEPENDENCY[0]

    def observe_shadows(self, observer: Callable[[str, Divergence], None]) -> None:
        """Have `observer` called with strategy and divergence of each request replayed, in the engine's thread."""
        self._contract.observer = observer

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the reuse strategies a request may ask for."""
        return tuple(self._strategies)

    @property
    def share_knowledge(self) -> bool:
        """Whether tenants share the KV of the knowledge bases."""
        return self._share

    @property
    def knowledge_names(self) -> tuple[str, ...]:
        """Names of the knowledge bases; the first is the default one."""
        return tuple(self._knowledge)

    @property
    def graph_names(self) -> tuple[str, ...]:
        """Names of the knowledge graphs; the first is the default one."""
        return tuple(self._graphs)

    def stats(self) -> dict[str, float | dict[str, float]]:
        """Counters since the start, and the present queue and pool."""
        metrics, counters = self._cache.metrics, self._counters
        return {
            "requests_total": dict(counters.requests),
            "prompt_tokens_total": counters.prompt_tokens,
            "reused_tokens_total": counters.reused_tokens,
            "recomputed_tokens_total": counters.recomputed_tokens,
            "generated_tokens_total": counters.generated_tokens,
            "cancelled_total": counters.cancelled,
            "errors_total": counters.errors,
            "steps_total": counters.steps,
            "exact_hit_tokens_total": metrics.exact_hit_tokens,
            "approximate_hit_tokens_total": metrics.approximate_hit_tokens,
            "missed_tokens_total": metrics.missed_tokens,
            "evicted_tokens_total": metrics.evicted_tokens,
            "tier_hit_tokens_total": dict(metrics.tier_hit_tokens),
            "transfers_total": dict(metrics.jobs),
            "transfer_bytes_total": dict(metrics.job_bytes),
            "transfer_seconds_total": dict(metrics.job_seconds),
            "transfer_failures_total": dict(metrics.failures),
            "load_fallbacks_total": dict(counters.load_fallbacks),
            "device_losses_total": counters.device_losses,
            "rest_error_max": metrics.loss_max,
            "host_bytes": metrics.host_bytes,
            "nodes": metrics.nodes,
            "queue_depth": len(self._waiting),
            "running": len(self._tickets),
            "pages_used": metrics.pages_used,
            "pages_total": self._cache.pool.capacity,
            "overhead_ms_last": counters.overhead_ms_last,
            "attention_calls_total": dict(self._runner.calls),
            "attention_fallbacks_total": dict(self._runner.fallbacks),
            **self._contract.stats(),
            **self._disk_stats(),
        }

    def _disk_stats(self) -> dict[str, float | dict[str, float]]:
        if self._disk is None:
            return {}
        stats = self._disk.stats()
        return {
            "disk_entries": stats.entries,
            "disk_bytes": stats.bytes,
            "disk_set_aside_total": stats.set_aside,
            "disk_evicted_total": stats.evicted,
        }

    # ------------------------------------------------------------------------------------- knowledge

    def add_documents(
        self,
        documents: Sequence[Document],
        knowledge: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> AddReport:
        """Add or replace documents by id; the named knowledge base is made if need be.

        progress: called with (documents done, documents in all).
        """
        return self._base(knowledge, create=True).add(documents, progress)

    def delete_documents(self, ids: Sequence[str], knowledge: str | None = None) -> int:
        """Remove documents by id; the number removed."""
        return self._base(knowledge, create=False).delete(ids)

    def search(self, question: str, *, knowledge: str | None = None, top_k: int | None = None) -> tuple[Hit, ...]:
        """The chunks that a request with this question would get, best first."""
        return self._base(knowledge, create=False).search(question, self.top_k if top_k is None else top_k)

    def document_ids(self, knowledge: str | None = None) -> frozenset[str]:
        """Ids of a knowledge base's documents."""
        return self._base(knowledge, create=False).document_ids

    def knowledge_base(self, name: str | None = None) -> KnowledgeBase:
        """A knowledge base itself (None: the default one).

        Raises:
            RequestError: if there is none of that name.
        """
        return self._base(name, create=False)

    def _base(self, name: str | None, *, create: bool) -> KnowledgeBase:
        if name is None:
            name = next(iter(self._knowledge), "default")
        if name not in self._knowledge:
            if not create:
                known = ", ".join(self._knowledge) or "none"
                message = f"unknown knowledge base {name!r}; there is: {known}"
                raise RequestError(message, param="rag.knowledge", code="not_found")
            self._knowledge[name] = self._open_knowledge(name)
        return self._knowledge[name]

    def add_triples(
        self,
        items: Iterable[Triple | Alias],
        graph: str | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> Imported:
        """Add facts, and other names of entities; the named graph is made if need be.

        progress: as `KnowledgeGraph.add` calls it.
        """
        return self._graph(graph, create=True).add(items, progress)

    def knowledge_graph(self, name: str | None = None) -> KnowledgeGraph:
        """A knowledge graph itself (None: the default one).

        Raises:
            RequestError: if there is none of that name.
        """
        return self._graph(name, create=False)

    def _graph(self, name: str | None, *, create: bool) -> KnowledgeGraph:
        if name is None:
            name = next(iter(self._graphs), "default")
        if name not in self._graphs:
            if not create or self._open_graph is None:
                known = ", ".join(self._graphs) or "none"
                message = f"unknown knowledge graph {name!r}; there is: {known}"
                raise RequestError(message, param="rag.graph.name", code="not_found")
            self._graphs[name] = self._open_graph(name)
        return self._graphs[name]

    # -------------------------------------------------------------------------------------- requests

    async def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        """Deltas as they come, then one answer. Closing the iterator cancels at the next pass boundary.

        Raises:
            RequestError: before the first event, if the request cannot be served as asked.
            OverloadError: before the first event, if the queue is full.
        """
        arrival = time.perf_counter()
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def sink(event: Event | BaseException) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the client's loop is gone; the request ends by itself
                _log.debug("event dropped: the event loop is closed")

        ticket = await asyncio.to_thread(self._prepare, request, sink, arrival)
        self._enqueue(ticket)
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Answer):
                    return
        finally:
            self._cancel(ticket)

    def answer(
        self,
        question: str | Sequence[Message],
        *,
        strategy: str | None = None,
        recompute_ratio: float | None = None,
        knowledge: str | None = None,
        top_k: int | None = None,
        documents: Sequence[str | Document] | None = None,
        graph: Graph | str | None = None,
        sampling: Sampling | None = None,
        want_logits: bool = False,
        continuation: Tokens | None = None,
        tenant: str = "",
        **options: float | int | str | tuple[str, ...] | None,
    ) -> Answer:
        """Answer a question (or continue a chat); `options` are fields of `core.Sampling`, `max_tokens` for instance.

        graph: facts to use instead of chunks; a name stands for all that the graph of this name has to say.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        messages = (Message("user", question),) if isinstance(question, str) else tuple(question)
        sampling = replace(sampling or Sampling(), **options)  # type: ignore[arg-type]
        asked = Graph(graph) if isinstance(graph, str) else graph
        rag = Rag(knowledge, top_k, strategy, None if documents is None else tuple(documents), recompute_ratio, asked)
        request = Request(messages, None, sampling, rag, tenant, want_logits, continuation)
        return _wait(self._begin(lambda sink, arrival: self._prepare(request, sink, arrival)))

    def answer_prompt(self, prompt: Prompt, **options: Any) -> Answer:
        """Answer a ready prompt of segments and wait for it; `options` are those of `begin_prompt`."""
        return _wait(self.begin_prompt(prompt, **options))

    def begin_prompt(
        self,
        prompt: Prompt,
        *,
        strategy: str | Strategy | None = None,
        recompute_ratio: float | None = None,
        sampling: Sampling | None = None,
        want_logits: bool = False,
        continuation: Tokens | None = None,
        background: bool = False,
        tenant: str = "",
        **options: float | int | str | tuple[str, ...] | None,
    ) -> Future[Answer]:
        """Begin to answer a ready prompt of segments: no retrieval, no template. For notebooks and benchmarks.

        strategy: a name, or one of your own. continuation, background: see `core.Request`. Cancelling the future
        cancels the request.

        Raises:
            RequestError: if it cannot be served as asked.
        """
        sampling = replace(sampling or Sampling(), **options)  # type: ignore[arg-type]
        name = strategy if isinstance(strategy, str) else None
        rag = Rag(strategy=name, recompute_ratio=recompute_ratio)
        request = Request((), None, sampling, rag, tenant, want_logits, continuation, background)
        own = None if isinstance(strategy, str) else strategy
        return self._begin(lambda sink, arrival: self._ticket(prompt, request, sink, arrival, 0.0, own))

    def compute_depkv(self, prompt: DepPrompt | Prompt, *, positions: Positions = "path", tenant: str = "") -> DepKV:
        """Compute a prompt under dependency attention, and hold its KV until it is closed (DepCache, section 5).

        Raises:
            RequestError: if the prompt cannot be served.
        """
        name = DEPENDENCY[0] if positions == "path" else DEPENDENCY[1]
        made = prompt.prompt() if isinstance(prompt, DepPrompt) else prompt
        found: list[DepKV] = []

        def keep(plan: Plan, holding: Holding) -> None:
            found.append(DepKV(made, name, tenant, plan, holding, holding.label, self._release))
            self._kept[holding.label] = found[-1]

        try:
            self.answer_prompt(made, strategy=Keeping(self._strategies[name], keep), max_tokens=1, tenant=tenant)
        except BaseException:
            for kv in found:
                kv.close()
            raise
        return found[-1]

    def generate_with_depkv(
        self, kv: DepKV, *, sampling: Sampling | None = None, **options: float | int | str | tuple[str, ...] | None
    ) -> Answer:
        """Generate behind a prompt whose KV is held; nothing of it is computed again. `options` as in `answer`.

        Raises:
            RequestError: if it was closed.
        """
        return self.answer_prompt(kv.prompt, strategy=Resumed(kv), sampling=sampling, tenant=kv.tenant, **options)

    def _release(self, kv: DepKV) -> None:
        def give_back() -> None:
            if kv.closed:
                return
            if any(isinstance(t.strategy, Resumed) and t.strategy.kv is kv for t in self._all_tickets()):
                raise RequestError("the KV is in use: close it when what is generated from it is done", param="kv")
            self._drop(kv, "the KV was closed")

        if not self._closed:
            self._call(give_back)

    def _drop(self, kv: DepKV, reason: str) -> None:
        del self._kept[kv.label]
        kv.closed = reason
        kv.holding.close()

    def clear_cache(self) -> None:
        """Drop all KV that no running request uses."""
        self._call(self._cache.clear)

    def holds(self, prompts: Sequence[Prompt], strategy: Strategy) -> tuple[bool, ...]:
        """Whether the KV that a strategy keeps of each prompt, the last of its `keys`, is in the cache or on disk."""
        kept: list[bool] = []

        def look() -> None:
            keys = [strategy.keys(prompt, self._cache, "")[-1] for prompt in prompts]
            on_disk = self._disk.find if self._disk is not None else lambda key: None
            kept.extend(self._cache.tree.find(key) is not None or on_disk(key) is not None for key in keys)

        self._call(look)
        return tuple(kept)

    def vacate_device(self) -> None:
        """Move all KV that no running request uses to the tiers below; what they cannot take is dropped."""
        self._call(self._cache.vacate)

    def audit(self) -> None:
        """Check every page, pin and key; raises `cache.pages.AuditError` naming what is wrong, leaks included."""
        self._call(lambda: self._cache.audit({ticket.id for ticket in self._tickets.values()} | set(self._kept)))

    def close(self) -> None:
        """Stop: running requests end with an error. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        self._thread.join()
        if self._mover is not None:
            self._mover.close()
        if self._disk is not None:
            self._disk.close()
        if self._recorder is not None:
            self._recorder.close()
        for base in self._knowledge.values():
            base.close()
        for graph in self._graphs.values():
            graph.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, prepare: Callable[[Sink, float], Ticket]) -> Future[Answer]:
        future: Future[Answer] = Future()

        def sink(event: Event | BaseException) -> None:
            with suppress(InvalidStateError):  # it was cancelled meanwhile
                if isinstance(event, BaseException):
                    future.set_exception(event)
                elif isinstance(event, Answer):
                    future.set_result(event)

        ticket = prepare(sink, time.perf_counter())
        future.add_done_callback(lambda done: self._cancel(ticket) if done.cancelled() else None)
        self._enqueue(ticket)
        return future

    # ------------------------------------------------------------------------- in the caller's thread

    def _prepare(self, request: Request, sink: Sink, arrival: float) -> Ticket:
        if request.prompt is not None:
            return self._ticket(prompts.text_prompt(self.tokenizer, request.prompt), request, sink, arrival, 0.0)
        if request.rag is not None and request.rag.graph is not None:
            return self._prepare_graph(request, request.rag.graph, sink, arrival)
        began = time.perf_counter()
        hits = self._retrieve(request)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        prompt = prompts.chat_prompt(self.tokenizer, request.messages, hits, public=self._share)
        return self._ticket(prompt, request, sink, arrival, retrieve_ms)

    def _prepare_graph(self, request: Request, asked: Graph, sink: Sink, arrival: float) -> Ticket:
        began, rag = time.perf_counter(), request.rag or Rag()
        if not request.messages:
            raise RequestError("a graph needs messages", param="rag.graph")
        graph = None if asked.given is not None else self._graph(asked.name, create=False)
        strategy, _ = self._resolve(replace(rag, strategy=self.strategy_of(rag)))
        build = partial(
            prompts.graph_prompt, self.tokenizer, request.messages, trees=strategy.name in DEPENDENCY,
            public=self._share, share=self._share and asked.given is None,
        )  # fmt: skip
        room = self.context_length - min(request.sampling.max_tokens, self.context_length // 2)
        grounded = fact.ground(fact.gather(graph, asked, request.messages[-1].content), build, room)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        ticket = self._ticket(grounded.prompt, request, sink, arrival, retrieve_ms, strategy)
        ticket.facts = grounded.facts
        ticket.notices += grounded.notices
        return ticket

    def _retrieve(self, request: Request) -> tuple[Hit, ...] | None:
        rag = request.rag
        if rag is None or not request.messages:
            return None
        top_k = self.top_k if rag.top_k is None else rag.top_k
        if rag.documents is not None:
            return self._given(rag.documents, rag.knowledge)
        if (rag.knowledge is None and not self._knowledge) or top_k == 0:
            return None
        base = self._base(rag.knowledge, create=False)
        return tuple(replace(hit, public=self._share) for hit in base.search(request.messages[-1].content, top_k))

    def _given(self, documents: Sequence[str | Document], knowledge: str | None) -> tuple[Hit, ...]:
        hits: list[Hit] = []
        for document in documents:
            if isinstance(document, Document):
                chunks = self._chunker.chunks(document)
                if not chunks:
                    raise RequestError(f"document {document.id!r} has no text", param="rag.documents")
            else:
                chunks = self._base(knowledge, create=False).document(document)
            hits += [Hit(chunk, 1.0, self._share and isinstance(document, str)) for chunk in chunks]
        return tuple(hits)

    def _ticket(
        self,
        prompt: Prompt,
        request: Request,
        sink: Sink,
        arrival: float,
        retrieve_ms: float,
        strategy: Strategy | None = None,
    ) -> Ticket:
        rag = request.rag or Rag()
        strategy, ratio = (strategy, rag.recompute_ratio) if strategy else self._resolve(rag)
        self._check_length(prompt, request)
        room = self.context_length - len(prompt)
        generation = Generation(request.sampling, self.tokenizer, self._eos_ids(), room)
        number = f"request-{next(self._numbers)}"
        ticket = Ticket(number, prompt, strategy, ratio, request, sink, arrival, retrieve_ms, generation)
        if not request.background and self._contract.draws():
            ticket.shadowed = []
        return ticket

    def _resolve(self, rag: Rag) -> tuple[Strategy, float | None]:
        """What serves a request, and the recompute ratio."""
        default = self.default_setting
        strategy = self._strategies.get(rag.strategy or default.strategy)
        if strategy is None:
            known = ", ".join(self._strategies)
            raise RequestError(f"unknown strategy {rag.strategy!r}; choose one of {known}", param="rag.strategy")
        if rag.recompute_ratio is not None and not strategy.selective:
            selective = ", ".join(name for name, other in self._strategies.items() if other.selective) or "none"
            raise RequestError(
                f"the strategy {strategy.name} takes no recompute_ratio; these do: {selective}",
                param="rag.recompute_ratio",
                code="invalid_value",
            )
        if rag.recompute_ratio is None and strategy.name == default.strategy:
            return strategy, default.ratio
        return strategy, rag.recompute_ratio

    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self._runner.config.eos_ids) | frozenset(self.tokenizer.eos_ids)

    def _check_length(self, prompt: Prompt, request: Request) -> None:
        if len(prompt) + 1 > self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context_length}, answer included. "
                "Shorten the messages, or retrieve fewer chunks",
                param="messages",
                code="context_length_exceeded",
            )
        needed = len(prompt) + self._decode_tokens(prompt, request)
        if needed > self.context_length:
            raise RequestError("prompt and continuation exceed the context", param="continuation")
        pages = self._cache.pool.pages_for(needed)
        # branches of a tree lie together; a strategy reads no more of them than there are slots
        pieces = sum(segment.kind is not Kind.NODE for segment in prompt.segments)
        if pages > self._cache.pool.capacity or not self._scheduler.fits(pieces, needed):
            raise RequestError(
                f"the request needs {pages} pages of KV; the device cache has {self._cache.pool.capacity}. "
                "Shorten the prompt, lower max_tokens, or give the device cache more memory",
                param="messages",
                code="context_length_exceeded",
            )

    def _decode_tokens(self, prompt: Prompt, request: Request) -> int:
        """Cells needed behind the prompt."""
        forced = 0 if request.continuation is None else len(request.continuation)
        return max(forced, min(request.sampling.max_tokens, self.context_length - len(prompt)))

    def _enqueue(self, ticket: Ticket) -> None:
        with self._lock:
            if self._closed:
                raise OverloadError("the engine is closed")
            running = sum(not other.request.background for other in list(self._tickets.values()))
            waiting = self._pending - running
            if not ticket.request.background:
                if waiting > self._max_queue:
                    raise OverloadError(f"{waiting} requests are in the queue; try again later")
                self._pending += 1
        self._inbox.put(lambda: self._arrive(ticket))

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        self._wake()

    def _wake(self) -> None:
        """Have the loop look around, if it sleeps. Callable in any thread."""
        self._inbox.put(lambda: None)

    def _call(self, function: Callable[[], object]) -> None:
        """Run a function in the engine's thread and wait for it."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                function()
                done.put(None)
            except BaseException as error:
                done.put(error)

        if self._closed:
            raise OverloadError("the engine is closed")
        self._inbox.put(run)
        error = done.get()
        if error is not None:
            raise error

    # ------------------------------------------------------------------------- in the engine's thread

    def _loop(self) -> None:
        busy = True
        while self._drain_inbox(busy):
            try:
                busy = self._turn()
            except Exception as error:  # a defect of ours must not take the other clients' server down
                for ticket in self._all_tickets():
                    self._fail(ticket, error)
        for ticket in self._all_tickets():
            self._end(ticket, OverloadError("the engine was closed"))
        self._put_away()

    def _all_tickets(self) -> list[Ticket]:
        return [*self._waiting, *self._background, *self._tickets.values()]

    def _turn(self) -> bool:
        """One look at everything; whether anything was done."""
        self._drop_cancelled()
        moved = self._cache.poll()
        self._blocked = self._blocked and not moved
        self._check_loads()
        self._admit()
        self._move()
        batch = self._scheduler.next_batch()
        if batch is not None:
            self._step(batch)
        # copies ahead of need take turns with steps only if there is no end of these
        copied = (batch is None or self._counters.steps % TEND_STEPS == 0) and self._cache.tend()
        return moved or copied or batch is not None

    def _drain_inbox(self, busy: bool) -> bool:
        """Run what other threads asked for; sleeps while there is nothing to do. False: stop."""
        wait = TICK if self._all_tickets() else None
        while True:
            try:
                message = self._inbox.get(block=not busy, timeout=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            busy = True

    def _put_away(self) -> None:
        """At the end: what only memory holds goes to disk."""
        if self._mover is None:
            return
        try:
            while self._cache.flush():
                self._mover.flush()
                self._cache.poll()
        except Exception:
            _log.exception("not everything was put on disk")

    def _arrive(self, ticket: Ticket) -> None:
        if ticket.request.background:
            self._background.append(ticket)
            return
        self._waiting.append(ticket)
        try:
            keys = ticket.strategy.keys(ticket.prompt, self._cache, ticket.request.tenant)
            self._cache.announce(ticket.id, keys)
        except Exception as error:
            self._fail(ticket, error)

    def _drop_cancelled(self) -> None:
        for ticket in [t for t in self._all_tickets() if t.cancelled]:
            self._counters.cancelled += 1
            self._end(ticket, None)

    def _check_loads(self) -> None:
        """Requests whose KV arrived go on; those whose KV will not, or not in time, begin anew and compute it."""
        now = time.perf_counter()
        for ticket in [t for t in self._tickets.values() if t.task is not None and not t.task.decoding]:
            assert ticket.task is not None
            holding = ticket.task.holding
            if holding.broken is not None:
                self._fall_back(ticket, "failed", f"KV could not be loaded and was computed anew: {holding.broken}")
            elif holding.ready:
                ticket.stop_waiting(now)
            elif ticket.waits_since is None:
                ticket.waits_since = now
            elif now - ticket.waits_since > self._load_timeout:
                self._fall_back(ticket, "slow", f"loading KV took over {self._load_timeout:g} s; it was computed anew")

    def _fall_back(self, ticket: Ticket, reason: str, notice: str) -> None:
        if not self._counters.load_fallbacks[reason]:
            _log.warning("%s", notice)
        self._counters.load_fallbacks[reason] += 1
        ticket.cold = False  # once is enough: a disk that always fails must not be asked for ever
        self._begin_anew(ticket, notice)

    def _begin_anew(self, ticket: Ticket, notice: str) -> None:
        task = ticket.task
        assert task is not None
        self._leave(task)
        ticket.begin_anew(notice)
        self._blocked = False
        (self._background if ticket.request.background else self._waiting).appendleft(ticket)

    def _leave(self, task: Task) -> None:
        (self._resting if task in self._resting else self._scheduler.tasks).remove(task)
        del self._tickets[id(task)]

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while they have room."""
        while self._waiting and not self._blocked:
            ticket = self._waiting[0]
            try:
                self._blocked = not self._start(ticket)
            except Exception as error:
                self._fail(ticket, error)
                continue
            if not self._blocked:
                self._waiting.popleft()
                self._cache.withdraw(ticket.id)
        self._admit_background()

    def _admit_background(self) -> None:
        """Background requests rest while others run or wait, and go on, a few at a time, while none does."""
        busy = bool(self._waiting) or any(not t.request.background for t in self._tickets.values())
        if busy:
            self._resting += [t for t in self._scheduler.tasks if self._tickets[id(t)].request.background]
            self._scheduler.tasks = [t for t in self._scheduler.tasks if t not in self._resting]
            return
        self._scheduler.tasks += self._resting
        self._resting = []
        while self._background and len(self._tickets) < BACKGROUND:
            ticket = self._background.popleft()
            try:
                if self._start(ticket):
                    continue
            except Exception as error:
                self._fail(ticket, error)
                continue
            self._background.appendleft(ticket)
            return

    def _stop_background(self) -> bool:
        """Have background requests give back what they hold; whether there were any."""
        tasks = [ticket.task for ticket in self._tickets.values() if ticket.request.background]
        for task in tasks:
            assert task is not None
            self._begin_anew(self._tickets[id(task)], "")
        return bool(tasks)

    def _start(self, ticket: Ticket) -> bool:
        """Match and reserve for a request; False if it has to wait for others to end.

        Raises:
            RequestError: if it is alone and still has no room.
        """
        for attempt in (1, 2):
            ticket.admitted = time.perf_counter()
            task = self._task(ticket)
            try:
                task.start()
            except OutOfPages as error:
                if not ticket.request.background and self._stop_background():
                    continue
                if self._tickets or self._cache.loading:
                    return False
                if attempt == 1:  # what it would reuse may lie scattered over more pages than it needs
                    self._cache.vacate()
                    continue
                raise RequestError(str(error), param="messages", code="context_length_exceeded") from error
            except BaseException:
                task.close()
                raise
            break
        ticket.task, ticket.waits_since = task, ticket.admitted
        if task.holding.ready:
            ticket.stop_waiting(time.perf_counter())
        self._tickets[id(task)] = ticket
        self._scheduler.tasks.append(task)
        if task.plan is not None:
            self._planned(ticket, task, task.plan)
        return True

    def _task(self, ticket: Ticket) -> Task:
        prompt = ticket.whole_prompt
        holding = Holding(
            self._cache,
            tenant=ticket.request.tenant,
            label=ticket.id,
            decode_tokens=self._decode_tokens(ticket.prompt, ticket.request) - len(ticket.generation.tokens),
            slots=self._runner.grid.slots[-1],
            stages=self._runner.stages,
            cold=ticket.cold,
        )
        return Task(prompt, ticket.strategy, holding, ticket.id, ticket.ratio)

    def _move(self) -> None:
        """Carry out the moves of tasks whose KV has arrived, until each has rows to compute."""
        for task in self._scheduler.moving():
            ticket = self._tickets[id(task)]
            try:
                while task.moving is not None and task.ready:
                    move = task.moving
                    self._runner.move(move.source_N, move.target_N, move.offset_N, move.layers)
                    self._advance(ticket, task)
            except Exception as error:
                if self._runner.lost:
                    self._recover(error)
                    return
                self._fail(ticket, error)

    def _step(self, batch: Batch) -> None:
        members = [self._tickets[id(piece.task)] for piece in batch.pieces]
        began = time.perf_counter()
        try:
            outcome = self._runner.step(batch.step)
            logits = self._runner.logits(outcome, batch.logit_rows) if batch.logit_rows else None
        except Exception as error:
            if self._runner.lost:
                self._recover(error)
                return
            for ticket in members:
                self._fail(ticket, error)
            return
        elapsed_ms = (time.perf_counter() - began) * 1e3
        self._counters.steps += 1
        for ticket in members:
            ticket.compute_ms += elapsed_ms
        for task in batch.deliver(logits, outcome.measured, outcome.residual):
            ticket = self._tickets[id(task)]
            try:
                self._advance(ticket, task)
            except Exception as error:
                self._fail(ticket, error)

    def _recover(self, error: Exception) -> None:
        """The device's pool is gone: begin anew with what host memory and disk hold (RAGCache, section 6).

        Requests before their first token are computed again; others continue behind the tokens that went out.
        """
        self._counters.device_losses += 1
        _log.error("the device's memory was lost; running requests begin anew", exc_info=error)
        for ticket in reversed(list(self._tickets.values())):
            if ticket.restarts >= RESTARTS:
                self._fail(ticket, error)
            else:
                self._begin_anew(ticket, "the device's memory was lost; the request was computed anew")
        for kv in list(self._kept.values()):
            self._drop(kv, "the KV was lost with the device's memory: compute it anew")
        self._runner.reset()
        while self._cache.loading:
            self._cache.poll()
            time.sleep(TICK)
        self._cache.lose_device()

    def _advance(self, ticket: Ticket, task: Task) -> None:
        """A pass or a decode step of the task is done."""
        if task.plan is None:
            task.pass_done()
            if task.plan is not None:
                self._planned(ticket, task, task.plan)
            return
        if ticket.wants_scores:
            ticket.take_scores()
            logits = task.plan.logits
        else:
            assert task.work is not None
            logits = task.work.logits[0]
        self._push(ticket, task, logits)

    def _planned(self, ticket: Ticket, task: Task, plan: Plan) -> None:
        """The prompt's KV and last logits are there."""
        if not ticket.first_token:
            self._note_first_token(ticket)
        if not ticket.force():
            self._push(ticket, task, plan.logits)

    def _push(self, ticket: Ticket, task: Task, logits: NDArray[np.float32]) -> None:
        """Choose the next token by these logits [V], and go on or end."""
        if ticket.shadowed is not None and len(ticket.shadowed) < STEPS:
            ticket.shadowed.append(logits)
        delta = ticket.generation.push(logits)
        if delta is not None:
            ticket.sink(delta)
        if ticket.generation.finish_reason is None:
            task.decode(ticket.generation.tokens[-1])
            return
        answer = self._answer(ticket, task)
        task.finish()
        self._end(ticket, answer)
        if ticket.shadowed and (answer.exact_to != "full" or answer.cached_tokens):
            self._replay(ticket, answer)

    def _replay(self, ticket: Ticket, answer: Answer) -> None:
        """Run a finished request again, in full and in the background, and compare the logits of its first steps."""
        assert ticket.shadowed is not None
        if self._shadows >= QUEUE:
            self._contract.drop("dropped")
            return
        live_NV = np.stack(ticket.shadowed)
        # row j predicts token j: what stands last is of no matter, and an end of text that was not kept needs no token
        said = np.array([*answer.tokens, 0][: len(live_NV)], np.int32)

        def sink(event: Event | BaseException) -> None:
            if isinstance(event, Delta):
                return
            self._shadows -= 1
            if isinstance(event, BaseException):
                self._contract.drop("failed")
                return
            try:
                assert event.scores is not None
                self._contract.observe(ticket.setting, answer.exact_to == "full", divergence(event.scores, live_NV))
            except Exception:  # a request that nobody waits for must not end others
                _log.exception("shadow replay failed")
                self._contract.drop("failed")

        request = Request((), None, Sampling(max_tokens=1), None, ticket.request.tenant, False, said, background=True)
        self._shadows += 1
        self._arrive(self._ticket(ticket.prompt, request, sink, time.perf_counter(), 0.0, Full()))

    def _note_first_token(self, ticket: Ticket) -> None:
        ticket.first_token = time.perf_counter()
        ttft_ms = (ticket.first_token - ticket.arrival) * 1e3
        self._counters.overhead_ms_last = ttft_ms - ticket.retrieve_ms - ticket.compute_ms

    def _answer(self, ticket: Ticket, task: Task) -> Answer:
        plan, generation = task.plan, ticket.generation
        assert plan is not None and generation.finish_reason is not None
        now = time.perf_counter()
        added = len(task.prompt.segments) - len(ticket.prompt.segments)  # what it said before it began anew
        reports = plan.reports[: len(plan.reports) - added]
        reused = sum(report.reused for report in reports)
        if not ticket.request.background:
            self._count(ticket, reports)
        exact = plan.exact_to == "full"
        return Answer(
            text=generation.text,
            finish_reason=generation.finish_reason,
            tokens=tuple(generation.tokens),
            prompt_tokens=len(ticket.prompt),
            cached_tokens=reused,
            strategy=ticket.strategy.name,
            exact_to=plan.exact_to,
            segments=reports,
            timings=Timings(
                retrieve=ticket.retrieve_ms,
                load=ticket.load_ms,
                prefill=(ticket.first_token - ticket.admitted) * 1e3 - ticket.load_ms,
                ttft=(ticket.first_token - ticket.arrival) * 1e3,
                total=(now - ticket.arrival) * 1e3,
            ),
            logprobs=tuple(generation.logprobs),
            logits=plan.logits if ticket.request.want_logits else None,
            notices=(
                *ticket.notices,
                *(self._contract.notices if ticket.by_default else ()),
                *(f"attention not by {refused}" for refused in self._runner.fallbacks),
            ),
            recompute_ratio=ticket.ratio,
            predicted=self._contract.predicted(ticket.setting, exact, ticket.chunks),
            scores=ticket.scores,
            figures=plan.figures,
            facts=ticket.facts,
        )

    def _count(self, ticket: Ticket, reports: Sequence[SegmentReport]) -> None:
        counters, generated = self._counters, len(ticket.generation.tokens)
        counters.requests[ticket.strategy.name] += 1
        counters.prompt_tokens += len(ticket.prompt)
        counters.reused_tokens += sum(report.reused for report in reports)
        counters.recomputed_tokens += sum(report.recomputed for report in reports)
        counters.generated_tokens += generated
        if self._recorder is not None:
            self._recorder.add(ticket.arrival, ticket.request.tenant, ticket.strategy.name, ticket.prompt, generated)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._counters.errors += 1
        if not isinstance(error, RequestError):
            _log.error("request failed", exc_info=error)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, last: Event | BaseException | None) -> None:
        """Take a request out of the engine, give back what it holds, and tell its owner."""
        if ticket.task is not None:
            ticket.task.close()
            self._leave(ticket.task)
            self._blocked = False
        elif ticket in self._background:
            self._background.remove(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            self._cache.withdraw(ticket.id)
        if not ticket.request.background:
            with self._lock:
                self._pending -= 1
        ticket.cancelled = True
        if last is not None:
            ticket.sink(last)


def _wait(future: Future[Answer]) -> Answer:
    try:
        return future.result()
    finally:
        future.cancel()  # of effect only if the caller was interrupted
