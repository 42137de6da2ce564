"""The endpoints, and the application they make."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Route

from ragjax import core
from ragjax.serve import page
from ragjax.serve.description import describe
from ragjax.serve.embedding import EmbeddingBody, EmbeddingQueue, RerankBody
from ragjax.serve.error import ApiError, api_error, in_anthropics_form
from ragjax.serve.ignored_fields import take_ignored
from ragjax.serve.library import LibraryEndpoints
from ragjax.serve.messages_api import MessageReply
from ragjax.serve.metric import ServerMetrics
from ragjax.serve.middleware import BrowserGuard, RequestMiddleware
from ragjax.serve.response import ChatForm, EchoForm, EventStream, Form, Json, TextForm, merged, respond
from ragjax.serve.responses_api import Reply, whole
from ragjax.serve.schema.chat import ChatBody, CompletionBody
from ragjax.serve.schema.message import CountBody, MessageBody
from ragjax.serve.schema.response import Item, ResponseBody, earlier_items
from ragjax.serve.server import Drain, Limits
from ragjax.serve.tracing import Spans

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

MAX_BODY_BYTES = 8 * 2**20  # default limit of a request's body, bytes
MAX_FILE_BYTES = 32 * 2**20  # default limit of an upload, bytes


def create_app(
    engine: Service,
    *,
    keys: Mapping[str, str] = MappingProxyType({}),
    metrics_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    timeout: float = Limits.timeout,
    drain: Drain | None = None,
    strict: bool = False,
    cors_origins: Sequence[str] = (),
    hosts: Collection[str] | None = None,
    proxied: bool = False,
) -> FastAPI:
    """The HTTP application over `engine`, which the caller closes once the app has stopped.

    keys: API keys, and the tenant behind each ("": none). If there are any, every route but /health and the page's
    files wants one as a bearer token. metrics_key: the only key that opens /metrics, and nothing else; None: /metrics
    is as the other routes. timeout: seconds in which a request's body must arrive. drain: shared with the server, which
    says by it that it stops. strict: refuse fields that have no effect, rather than name them in a notice.
    cors_origins: where pages of a browser may come from that call this server; "*": anywhere. hosts: names that the
    server may be called by if there are no keys, in lower case; None: any. proxied: as in `RequestMiddleware`.
    """
    metrics = ServerMetrics(engine)
    embedder = EmbeddingQueue(engine)
    spans = Spans.wanted()
    endpoints = _Endpoints(engine, embedder, metrics, strict, names=not keys, spans=spans)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        with closing(embedder):
            yield
        if spans is not None:
            await asyncio.to_thread(spans.close)

    # No /docs and /redoc: their pages load scripts from elsewhere. A missing content-type counts as JSON.
    app = FastAPI(
        title="ragjax",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        strict_content_type=False,
        lifespan=lifespan,
    )
    app.state.metrics = metrics
    app.add_api_route("/health", endpoints.health, response_model=None)
    app.add_api_route("/health", endpoints.health, methods=["HEAD"], response_model=None, include_in_schema=False)
    app.add_api_route("/metrics", endpoints.metrics, response_class=Response)
    app.add_api_route("/v1/cache", endpoints.cache)
    app.add_api_route("/v1/models", endpoints.models)
    app.add_api_route("/v1/models/{model:path}", endpoints.model)
    for path, endpoint in (
        ("/v1/chat/completions", endpoints.chat),
        ("/v1/completions", endpoints.completion),
        ("/v1/embeddings", endpoints.embedding),
        ("/v1/rerank", endpoints.rank),
        ("/v1/responses", endpoints.response),
        ("/v1/messages", endpoints.message),
        ("/v1/messages/count_tokens", endpoints.count),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    app.include_router(LibraryEndpoints(engine).router())
    site = page.read()
    for path, file in site.items():
        zipped = GZipMiddleware(file, minimum_size=0)
        app.router.routes.append(Route(path, zipped, methods=["GET"], include_in_schema=False))  # and HEAD
    for kind in (core.RagjaxError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(
        RequestMiddleware,
        metrics=metrics,
        keys=keys,
        guard=BrowserGuard(cors_origins, hosts),
        max_body_bytes=max_body_bytes,
        max_file_bytes=max_file_bytes,
        timeout=timeout,
        drain=drain or Drain(),
        public=frozenset({"/health", *site}),
        metrics_key=metrics_key,
        proxied=proxied,
    )
    describe(app)
    if cors_origins:  # in front of the other: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return api_error(error, request.scope).response(request.url.path)


def _no_model(name: str, own: str) -> ApiError:
    message = f"the model {name!r} does not exist here; this server has {own!r}"
    return ApiError(404, message, param="model", code="model_not_found")


SKIPPED = 10  # files that were left out and are named in /health; the store of the knowledge base lists all
FRESH = 1.0  # seconds for which an inventory is told again: to make one holds up the engine's thread


class RecentInventories:
    """Bodies of GET /v1/cache by tenant; now: the time in seconds."""

    def __init__(self, look: Callable[[str], core.Inventory], now: Callable[[], float] = time.monotonic):
        self._look = look
        self._now = now
        self._seen: dict[str, tuple[float, Json]] = {}
        self._lock = asyncio.Lock()

    async def body_for(self, tenant: str) -> Json:
        async with self._lock:
            at, body = self._seen.get(tenant, (-FRESH, {}))
            if not body or self._now() - at >= FRESH:
                body = await asyncio.to_thread(lambda: self._look(tenant).body())
                self._seen[tenant] = self._now(), body
            return body


def _grounded(request: core.Request, knowledge: str) -> core.Request:
    rag = request.rag
    others = () if rag is None else tuple(name for name in rag.named if name != knowledge)
    if request.prompt is not None:
        reason = f"text completions retrieve nothing, so none from {knowledge!r}"
    elif rag is None:
        reason = f"the model's name asks for knowledge from {knowledge!r}, and rag: null for none"
    elif others:
        named = ", ".join(map(repr, rag.named))
        reason = f"the model's name asks for knowledge from {knowledge!r}, and the request for {named}"
    else:
        return request if rag.named else replace(request, rag=replace(rag, knowledge=knowledge))
    raise core.invalid("model", f"{reason}: change one of them")


class _Endpoints:
    """names: whether names of files are for everybody."""

    def __init__(
        self,
        engine: Service,
        embedder: EmbeddingQueue,
        metrics: ServerMetrics,
        strict: bool,
        names: bool,
        spans: Spans | None,
    ):
        self._engine, self._embedder, self._metrics, self._spans = engine, embedder, metrics, spans
        self._strict, self._names = strict, names
        self._inventories = RecentInventories(engine.inventory)
        self._created = int(time.time())

    async def health(self) -> Json | Response:
        shares = self._engine.shares
        replicas = self._engine.replicas() if hasattr(self._engine, "replicas") else None
        facts: Json = {"model": self._engine.model_name, "strategy": self._engine.strategy_summary}
        facts["programs_left"] = self._engine.programs_left
        if shares is not None:
            facts["shared_cache"] = "on" if shares else "off"
        progress = self._engine.preprocessed(tenants=False)  # anybody may look: what tenants have is not told
        if progress is not None:
            facts["preprocessing"] = asdict(progress)
        told = self._engine.indexing
        if told is not None:
            facts["indexing"] = told.body(SKIPPED if self._names else 0)
        if replicas is not None:
            facts["replicas"] = {"up": replicas.up, "wanted": replicas.wanted}
            if not replicas.up:
                return JSONResponse({"status": "unavailable", "ready": False, **facts}, 503)
        return {"status": "ok", "ready": True, **facts}

    async def metrics(self) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def cache(self, request: Request) -> Json:
        return await self._inventories.body_for(request.state.tenant)

    async def models(self) -> Json:
        engine = self._engine
        names = [engine.model_name, *(f"{engine.model_name}:{name}" for name in engine.knowledge_names)]
        return {"object": "list", "data": [*map(self._model, names), self._model(engine.embedding_model)]}

    async def model(self, model: str) -> Json:
        if not model:  # a slash behind the list's address
            return await self.models()
        if model != self._engine.embedding_model:
            self._knowledge_of(model)
        return self._model(model)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        return await self._respond(ChatForm, body, request)

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        return await self._respond(TextForm, body, request)

    async def response(self, body: ResponseBody, request: Request) -> Response:
        tenant, notices, asked_items = request.state.tenant, take_ignored(body, strict=self._strict), body.input
        if body.previous_response_id is not None:
            library = self._engine.library
            earlier = await asyncio.to_thread(library.conversation, tenant, body.previous_response_id)
            body = body.model_copy(update={"input": [*earlier_items(earlier), *body.input]})
        sources: list[core.Source] = []
        if (search := body.search) is not None:
            wanted = None if search.filters is None else search.filters.to_core()
            for store in search.vector_store_ids:
                within = await asyncio.to_thread(self._engine.library.within, tenant, store, wanted)
                sources.append(core.Source(store, within))
        [asked] = await self._ready(body.model, [body.to_core(tuple(sources))], tenant)
        reply = Reply(self._engine, body, asked, notices)
        told = reply.told(self._events(asked, request))
        if body.store is not False:
            told = self._keeping(told, reply, body, asked_items, request)
        if body.stream:
            return EventStream(told, reply.failed, end=b"")
        return await respond(whole(told), request)

    async def _keeping(
        self,
        told: AsyncGenerator[Json, None],
        reply: Reply,
        body: ResponseBody,
        items: Sequence[Item],
        request: Request,
    ) -> AsyncGenerator[Json, None]:
        """Yields the events of a response, which is kept before the last one is told.

        One whose stream began and broke off is kept as failed, or as cancelled if its client left.
        """

        async def keep(response: Json) -> None:
            given = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in items]
            kept = core.KeptResponse(response["id"], body.previous_response_id, json.dumps(given), json.dumps(response))
            await asyncio.to_thread(self._engine.library.keep_response, request.state.tenant, kept)

        begun = False
        try:
            async with aclosing(told) as events:
                async for event in events:
                    begun = bool(body.stream)
                    response = event.get("response", {})
                    if response.get("status") in ("completed", "incomplete"):
                        begun = False
                        await keep(response)
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            if begun:
                with suppress(core.RagjaxError):  # it cannot be told
                    await keep(reply.broken_off("cancelled"))
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if not begun:
                raise
            failure = api_error(error, request.scope)
            with suppress(core.RagjaxError):
                await keep(reply.broken_off("failed", failure))
            raise failure from error

    async def message(self, body: MessageBody, request: Request) -> Response:
        notices = take_ignored(body, strict=self._strict)
        [asked] = await self._ready(body.model, [body.to_core()], request.state.tenant)
        reply = MessageReply(self._engine, asked, notices)
        events = self._events(asked, request)
        if body.stream:
            return EventStream(reply.told(events), in_anthropics_form, end=b"")
        return await respond(reply.whole(events), request)

    async def count(self, body: CountBody, request: Request) -> Json:
        take_ignored(body, strict=self._strict)
        [asked] = await self._ready(body.model, [body.to_core()], request.state.tenant)
        return {"input_tokens": await asyncio.to_thread(self._engine.prompt_tokens, asked)}

    async def _ready(self, model: str, requests: Sequence[core.Request], tenant: str) -> list[core.Request]:
        """Gives the requests of a body their tenant, and the knowledge that the model's name brings along.

        Notes that their stores are used; raises RequestError if one has expired.
        """
        knowledge = self._knowledge_of(model)
        asked = [replace(one, tenant=tenant) for one in requests]
        asked = asked if knowledge is None else [_grounded(one, knowledge) for one in asked]
        for name in () if asked[0].rag is None else asked[0].rag.named:
            await asyncio.to_thread(self._engine.library.use, tenant, name)
        return asked

    async def embedding(self, body: EmbeddingBody, request: Request) -> Response:
        notices = self._of_encoder(body)
        return await respond(self._embedder.answer(request.state.tenant, body, notices), request)

    async def rank(self, body: RerankBody, request: Request) -> Response:
        notices = self._of_encoder(body)
        return await respond(self._embedder.rank(request.state.tenant, body, notices), request)

    def _of_encoder(self, body: EmbeddingBody | RerankBody) -> tuple[str, ...]:
        name, notices = self._engine.embedding_model, take_ignored(body, strict=self._strict)
        if body.model != name:
            raise _no_model(body.model, name)
        return notices

    async def _respond(self, form_of: type[Form], body: ChatBody | CompletionBody, request: Request) -> Response:
        notices = take_ignored(body, strict=self._strict)
        asked = await self._ready(body.model, body.to_core(), request.state.tenant)
        form_of = EchoForm if isinstance(body, CompletionBody) and body.echo else form_of
        form = form_of(self._engine, asked, body.n or 1, notices)
        silent = isinstance(body, CompletionBody) and body.max_tokens == 0
        events = merged([self._scored(x, request, silent) if x.echo else self._events(x, request) for x in asked])
        if body.stream:
            return EventStream(form.stream(events, body.include_usage, body.include_sources))
        return await respond(form.whole(events), request)

    async def _scored(self, request: core.Request, http: Request, silent: bool) -> AsyncGenerator[core.Event, None]:
        """Yields the answer with the log-probabilities of its prompt before its own; silent: and nothing else of it."""
        once = replace(request, sampling=replace(request.sampling, max_tokens=1))
        *_, scored = [event async for event in self._events(once, http)]
        assert isinstance(scored, core.Answer)
        if silent:
            yield replace(scored, text="", tokens=(), finish_reason="length")
            return
        async for event in self._events(replace(request, echo=False), http):
            if isinstance(event, core.Answer):
                begin = len(request.prompt) if isinstance(request.prompt, str) else scored.logprobs[-1].begin + 1
                own = [replace(one, begin=begin + one.begin) for one in event.logprobs]
                yield replace(event, logprobs=(*scored.logprobs, *own))

    async def _events(self, request: core.Request, http: Request) -> AsyncGenerator[core.Event, None]:
        """Yields the engine's events and records TTFT and inter-token time.

        TTFT is labelled by strategy, so it is recorded with the answer.
        """
        first = last = None
        async with aclosing(self._engine.submit(request)) as events:
            async for event in events:
                now = time.perf_counter()
                first = first or now
                if isinstance(event, core.Answer):
                    self._metrics.ttft_seconds.labels(event.strategy).observe(first - http.state.arrived)
                    if self._spans is not None:
                        self._spans.record(event, http.headers)
                elif last is not None:
                    self._metrics.inter_token_seconds.observe(now - last)
                last = now
                yield event

    def _knowledge_of(self, model: str) -> str | None:
        """Returns the knowledge base that a model's name brings along: MODEL:KNOWLEDGE is for clients without `rag`."""
        knowledge = model.removeprefix(f"{self._engine.model_name}:")
        if knowledge != model and knowledge in self._engine.knowledge_names:
            return knowledge
        if model != self._engine.model_name:
            raise _no_model(model, self._engine.model_name)
        return None

    def _model(self, name: str) -> Json:
        engine = self._engine
        model: Json = {"id": name, "object": "model", "created": self._created, "owned_by": "ragjax"}
        if name == engine.embedding_model:
            return model
        return {
            **model,
            "context_length": engine.context_length,
            "rag": {
                "knowledge": list(engine.knowledge_names),
                "graphs": list(engine.graph_names),
                "strategies": list(engine.strategies),
                "selective": list(engine.selective),
                "default_strategy": engine.default_strategy,
                "default_recompute_ratio": engine.default_setting.ratio,
                "summary": engine.strategy_summary,
            },
        }
