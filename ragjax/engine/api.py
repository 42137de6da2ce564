"""The engine: a model, its cache and its knowledge behind one Python API.

    engine = Engine.load("smollm2-135m-instruct")
    engine.add_documents([Document("a", "The ferry leaves at nine.")])
    print(engine.answer("When does the ferry leave?").text)

Retrieval and tokenising happen in the caller's thread; the loop's thread owns cache, pool and scheduler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import (
    Answer,
    Chunk,
    ClosedError,
    ConfigError,
    Divergence,
    Document,
    Event,
    Graph,
    Hit,
    Kind,
    Message,
    Plan,
    Prompt,
    Rag,
    Request,
    RequestError,
    Sampling,
    StorageOptions,
    Tokens,
)
from ragjax.core.depprompt import DepPrompt, Positions
from ragjax.engine.depkv import DepKV, Keeping, Resumed
from ragjax.engine.loop import Loop
from ragjax.engine.shadow import Shadows
from ragjax.engine.trace import Recorder
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting import chat as prompts
from ragjax.prompting import facts as fact
from ragjax.quality.contract import Contract
from ragjax.quality.report import Setting
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import AddReport, KnowledgeBase
from ragjax.reuse import DEPENDENCY
from ragjax.reuse.base import Allocation, Strategy
from ragjax.reuse.full import Full
from ragjax.runner.runner import Runner
from ragjax.schedule.sampling import Generation
from ragjax.schedule.state import Sink, Ticket
from ragjax.store.disk import DiskStore
from ragjax.store.transfer import KVTransfer

if TYPE_CHECKING:
    from ragjax.retrieval.graph import Imported, KnowledgeGraph
    from ragjax.retrieval.path import Triple
    from ragjax.retrieval.triples import Alias

_log = logging.getLogger(__name__)

PATH_CHARS = 64
"""Characters of given relation paths for each token of the context, at most: all are encoded to see how many fit."""


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
        transfer: KVTransfer | None = None,
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
        self.identity = identity  # digest of what KV depends on besides tokens
        self.tokenizer = tokenizer
        self.top_k = top_k
        self._contract = contract or Contract(Setting(default_strategy), runner.dtype)
        self._runner = runner
        self._cache = cache
        self._transfer = transfer
        self._disk = disk
        self._share = share_knowledge
        self._recorder = recorder
        self._strategies = strategies
        self._knowledge: dict[str, KnowledgeBase] = {}
        self._chunker = chunker
        self._open_knowledge = open_knowledge
        self._graphs: dict[str, KnowledgeGraph] = {}
        self._open_graph = open_graph
        self._numbers = itertools.count(1)
        self._loop = Loop(
            runner,
            cache,
            self._contract,
            Shadows(self._contract, self._shadow).of,
            max_queue=max_queue,
            load_timeout=load_timeout,
            transfer=transfer,
            recorder=recorder,
        )

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
            record_trace: file to which every request is added, as hashes and sizes (`ragjax.engine.trace`).
            graph: triples in a .tsv, .jsonl or .nt file, or several by name; the first is the default graph.
            graph_dir: where graphs are kept between starts; in memory if None.

        Raises:
            ConfigError: saying what to change.
        """
        from ragjax.engine.build import load_engine  # the parts that a bare machine may lack are imported there

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
        if rag is None or rag.graph is None or self._contract.faulted:
            return self.default_strategy
        return DEPENDENCY[0]

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
        metrics, counters = self._cache.metrics, self._loop.counters
        return {
            "requests_total": dict(counters.requests),
            "prompt_tokens_total": counters.prompt_tokens,
            "reused_tokens_total": counters.reused_tokens,
            "recomputed_tokens_total": counters.recomputed_tokens,
            "generated_tokens_total": counters.generated_tokens,
            "cancelled_total": counters.cancelled,
            "errors_total": counters.errors,
            "steps_total": counters.steps,
            "lookups_total": metrics.lookups,
            "exact_hit_tokens_total": metrics.exact_hit_tokens,
            "approximate_hit_tokens_total": metrics.approximate_hit_tokens,
            "missed_tokens_total": metrics.missed_tokens,
            "admitted_tokens_total": metrics.admitted_tokens,
            "evicted_tokens_total": metrics.evicted_tokens,
            "unwritten_tokens_total": metrics.unwritten_tokens,
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
            "queue_depth": self._loop.waiting,
            "running": self._loop.running,
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
        self._loop.enqueue(ticket)
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Answer):
                    return
        finally:
            self._loop.cancel(ticket)

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
        name = strategy if strategy is None or isinstance(strategy, str) else strategy.name
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

        def keep(plan: Plan, allocation: Allocation) -> None:
            found.append(DepKV(made, name, tenant, plan, allocation, allocation.label, self._release))
            self._loop.kept[allocation.label] = found[-1]

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
            if any(isinstance(t.strategy, Resumed) and t.strategy.kv is kv for t in self._loop.tickets()):
                raise RequestError("the KV is in use: close it when what is generated from it is done", param="kv")
            self._loop.drop(kv, "the KV was closed")

        with suppress(ClosedError):  # all was given back when the engine was closed
            self._loop.call(give_back)

    def clear_cache(self) -> None:
        """Drop all KV that no running request uses."""
        self._loop.call(self._cache.clear)

    def holds(self, prompts: Sequence[Prompt], strategy: Strategy, *, meta: bool = False) -> tuple[bool, ...]:
        """Whether the KV that a strategy keeps of each prompt, the last of its `keys`, is in the cache or on disk.

        meta: only if there is something that a strategy noted with it.
        """
        kept: list[bool] = []

        def look() -> None:
            for prompt in prompts:
                key = strategy.keys(prompt, self._cache, "")[-1]
                found = self._cache.tree.find(key) or (self._disk.find(key) if self._disk is not None else None)
                kept.append(found is not None and (bool(found.meta) or not meta))

        self._loop.call(look)
        return tuple(kept)

    def vacate_device(self) -> None:
        """Move all KV that no running request uses to the tiers below; what they cannot take is dropped."""
        self._loop.call(self._cache.vacate)

    def audit(self) -> None:
        """Check every page, pin and key; raises `cache.pages.AuditError` naming what is wrong, leaks included."""
        self._loop.call(lambda: self._cache.audit(self._loop.holders()))

    def close(self) -> None:
        """Stop: running requests end with an error. Safe to call twice."""
        if self._loop.closed:
            return
        self._loop.close()
        if self._transfer is not None:
            self._transfer.close()
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
        future.add_done_callback(lambda done: self._loop.cancel(ticket) if done.cancelled() else None)
        self._loop.enqueue(ticket)
        return future

    # ------------------------------------------------------------------------- in the caller's thread

    def _prepare(self, request: Request, sink: Sink, arrival: float) -> Ticket:
        self._check_texts(request)
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
        self._check_given(asked.relation_paths or ())
        graph = None if asked.relation_paths is not None else self._graph(asked.name, create=False)
        strategy, _ = self._resolve(replace(rag, strategy=self.strategy_of(rag)))
        build = partial(
            prompts.graph_prompt, self.tokenizer, request.messages, trees=strategy.name in DEPENDENCY,
            public=self._share, share=self._share and asked.relation_paths is None,
        )  # fmt: skip
        room = self.context_length - min(request.sampling.max_tokens, self.context_length // 2)
        grounded = fact.ground(fact.gather(graph, asked, request.messages[-1].content), build, room)
        retrieve_ms = (time.perf_counter() - began) * 1e3
        ticket = self._ticket(grounded.prompt, request, sink, arrival, retrieve_ms, strategy)
        ticket.facts = grounded.facts
        ticket.notices += grounded.notices
        return ticket

    def _check_given(self, paths: Sequence[Sequence[str]]) -> None:
        given, most = sum(len(step) for path in paths for step in path), PATH_CHARS * self.context_length
        if given > most:
            raise RequestError(
                f"the relation paths have {given} characters; the context takes up to {most}. Give fewer paths",
                param="rag.graph.relation_paths",
                code="context_length_exceeded",
            )

    def _retrieve(self, request: Request) -> tuple[Hit, ...] | None:
        rag = request.rag
        if rag is None or not request.messages:
            return None
        top_k = self.top_k if rag.top_k is None else rag.top_k
        if rag.knowledge is not None:
            self._base(rag.knowledge, create=False)  # an unknown name is an error even where nothing is looked up
        if rag.documents is not None:
            return self._given(rag.documents, rag.knowledge)
        if (rag.knowledge is None and not self._knowledge) or top_k == 0:
            return None
        base = self._base(rag.knowledge, create=False)
        return tuple(replace(hit, public=self._share) for hit in base.search(request.messages[-1].content, top_k))

    def _given(self, documents: Sequence[str | Document], knowledge: str | None) -> tuple[Hit, ...]:
        hits: list[Hit] = []
        room = self.context_length
        for document in documents:
            if isinstance(document, Document):
                chunks = self._cut(document, room)
            else:
                chunks = self._base(knowledge, create=False).document(document)
            hits += [Hit(chunk, 1.0, self._share and isinstance(document, str)) for chunk in chunks]
            room -= sum(len(chunk.tokens) for chunk in chunks)
            if room < 0:
                raise self._overlong("documents have", "Give fewer or shorter documents", "rag.documents")
        return tuple(hits)

    def _cut(self, document: Document, room: int) -> tuple[Chunk, ...]:
        # cutting takes long, and drops but white space: what is twice too long is seen without
        if self._chunker.exceeds(document.text, 2 * room):
            raise self._overlong("documents have", "Give fewer or shorter documents", "rag.documents")
        chunks = self._chunker.chunks(document)
        if not chunks:
            raise RequestError(f"document {document.id!r} has no text", param="rag.documents")
        return chunks

    def _overlong(self, what: str, advice: str, param: str) -> RequestError:
        most = self.context_length
        reason = f"the {what} more than {most} tokens; the context holds no more, answer included"
        return RequestError(f"{reason}. {advice}", param=param, code="context_length_exceeded")

    def _check_texts(self, request: Request) -> None:
        """Refuse what is clearly too long before all of it is encoded, which nobody could stop."""
        if request.prompt is not None and self._chunker.exceeds(request.prompt, 2 * self.context_length):
            raise self._overlong("prompt has", "Shorten it", "prompt")
        if any(self._chunker.exceeds(message.content, 2 * self.context_length) for message in request.messages):
            raise self._overlong("messages have", "Shorten them", "messages")

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
        strategy, ratio = (strategy, rag.recompute_ratio) if strategy else self._resolve(rag, prompt.preprocessed)
        room = self.context_length - len(prompt)
        raw = request.prompt is not None
        generation = Generation(request.sampling, self.tokenizer, self._eos_ids(), room, continued=raw)
        number = f"request-{next(self._numbers)}"
        ticket = Ticket(number, prompt, strategy, ratio, request, sink, arrival, retrieve_ms, generation)
        self._check_length(ticket)
        if not request.background and self._contract.draws():
            ticket.shadowed = []
        return ticket

    def _resolve(self, rag: Rag, preprocessed: bool = True) -> tuple[Strategy, float | None]:
        """What serves a request, and the recompute ratio. preprocessed: whether all its chunks are."""
        default = self._contract.setting_of(preprocessed)
        strategy = self._strategies.get(default.strategy if rag.strategy is None else rag.strategy)
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

    def _check_length(self, ticket: Ticket) -> None:
        prompt, capacity = ticket.prompt, self._cache.pool.capacity
        raw = ticket.request.prompt is not None
        param = "prompt" if raw else "messages"
        if len(prompt) + 1 > self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context_length}, answer included. "
                f"Shorten {'it' if raw else 'the messages, or retrieve fewer chunks'}",
                param=param,
                code="context_length_exceeded",
            )
        needed = len(prompt) + ticket.decode_tokens
        if needed > self.context_length:
            raise RequestError("prompt and continuation exceed the context", param="continuation")
        pages = self._cache.pool.pages_for(needed)
        # branches of a tree lie together; a strategy reads no more of them than there are entries
        pieces = sum(segment.kind is not Kind.NODE for segment in prompt.segments)
        if pages > capacity:
            raise RequestError(
                f"the request needs {pages} pages of KV; the device cache has {capacity}. "
                "Shorten the prompt, lower max_tokens, or give the device cache more memory",
                param=param,
                code="context_length_exceeded",
            )
        if not self._loop.fits(pieces, needed):
            raise RequestError(
                f"the prompt has {pieces} passages, each with KV of its own, and {needed} tokens with the answer: more "
                "than attention can read at a time. Give or retrieve fewer passages, or lower max_tokens",
                param=param,
                code="context_length_exceeded",
            )

    def _shadow(self, prompt: Prompt, request: Request, sink: Sink) -> Ticket:
        return self._ticket(prompt, request, sink, time.perf_counter(), 0.0, Full())


def _wait(future: Future[Answer]) -> Answer:
    try:
        return future.result()
    finally:
        future.cancel()  # of effect only if the caller was interrupted
