"""HTTP server: OpenAI's chat and text completions over an engine, with the account of what was reused.

    python -m ragjax.serve --model smollm2-135m-instruct --knowledge DIR_OR_JSONL

Requests and answers have the shapes of OpenAI's API reference, so its clients work unchanged; the
field `rag` extends both. What the engine cannot do is refused by name: a body never holds a field
that is read by nobody, except `user`, which is OpenAI's label for the end user and has no effect.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import logging
import math
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Protocol, TypeVar, cast

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragjax import core

T = TypeVar("T")
Json = dict[str, Any]

MAX_BODY_BYTES = 8 * 2**20
"""Default limit of a request's body, bytes."""

_log = logging.getLogger("ragjax.serve")


class ServedEngine(Protocol):
    """What the server needs of an engine (`ragjax.engine.Engine`, or a fake in tests)."""

    @property
    def model_name(self) -> str:
        """Name that requests must give as `model`."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names that `rag.strategy` may take."""

    @property
    def default_strategy(self) -> str:
        """Strategy of a request that names none."""

    @property
    def knowledge_names(self) -> tuple[str, ...]:
        """Names that `rag.knowledge` may take."""

    def submit(self, request: core.Request) -> AsyncIterator[core.Event]:
        """Deltas, then one answer; closing it cancels the request. Request errors come before the first event."""

    def stats(self) -> Mapping[str, float | Mapping[str, float]]:
        """Counters (names that end in `_total`, since start-up) and gauges, some split by one label."""


# ---------------------------------------------------------------------------------- request bodies


def _only(value: object, *, hint: str) -> Callable[[object], object]:
    def check(given: object) -> object:
        if given is not None and given != value:
            context = {"value": value, "hint": hint}
            raise PydanticCustomError("unsupported_value", "only {value} is supported: {hint}", context)
        return given

    return check


def _encodable(text: str) -> str:
    # JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes.
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    raise PydanticCustomError("invalid_text", "holds half of a surrogate pair, which is no character")


def _parts(content: object) -> object:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError("invalid_type", "must be a string or a list of text parts")


def _strings(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _one_text(prompt: object) -> object:
    if not isinstance(prompt, list):
        return prompt
    if any(not isinstance(item, str) for item in prompt):
        raise PydanticCustomError("invalid_type", "token ids are not accepted: send the prompt as text")
    if len(prompt) != 1:
        raise PydanticCustomError("unsupported_value", "one prompt per request: send several requests")
    return prompt[0]


Text = Annotated[str, AfterValidator(_encodable)]
Filled = Annotated[Text, Field(min_length=1)]
One = Annotated[int, AfterValidator(_only(1, hint="send several requests"))]
Zero = Annotated[float, AfterValidator(_only(0, hint="penalties are not implemented"))]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Body):
    """One text part of a message; images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Body):
    """One message. `developer` is OpenAI's newer name of `system`; `refusal` comes back null with our own answers."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])]
    refusal: None = None


class InlineDocument(_Body):
    """A passage given with the request."""

    id: Filled
    text: Filled
    title: Text = ""


class RagBody(_Body):
    """What knowledge to use and how to reuse its KV.

    documents: passages used instead of retrieval: ids of the knowledge base, or whole documents.
    """

    knowledge: Text | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    strategy: Text | None = None
    documents: (
        list[
            Annotated[
                Annotated[Text, Tag("id")] | Annotated[InlineDocument, Tag("document")],
                Discriminator(lambda value: "id" if isinstance(value, str) else "document"),
            ]
        ]
        | None
    ) = None


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False


class ResponseFormat(_Body):
    """Form of the answer: plain text only."""

    type: Literal["text"]


class _Generation(_Body):
    """The fields that both completion endpoints share."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: One | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[Text], BeforeValidator(_strings, json_schema_input_type=str | list[str])] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    user: Text | None = None
    rag: RagBody | None = Field(default_factory=RagBody)


class ChatBody(_Generation):
    """Body of POST /v1/chat/completions. `rag: null` turns retrieval off."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(_Generation):
    """Body of POST /v1/completions: raw text, no chat template and no retrieval."""

    prompt: Annotated[Filled, BeforeValidator(_one_text, json_schema_input_type=str | list[str])]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[bool, AfterValidator(_only(False, hint="put the prompt before the text yourself"))] | None = None
    best_of: One | None = None


def _chat_request(body: ChatBody, tenant: str) -> core.Request:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise core.RequestError("set max_completion_tokens or max_tokens, not both", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise core.RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return core.Request(
        messages=tuple(_message(m) for m in body.messages),
        sampling=_sampling(body, body.max_tokens or body.max_completion_tokens, _alternatives(body)),
        rag=None if body.rag is None else _rag(body.rag),
        tenant=tenant,
    )


def _completion_request(body: CompletionBody, tenant: str) -> core.Request:
    return core.Request(
        prompt=body.prompt,
        sampling=_sampling(body, body.max_tokens, body.logprobs),
        rag=None if body.rag is None else _rag_without_retrieval(body.rag),
        tenant=tenant,
    )


def _message(message: ChatMessage) -> core.Message:
    role: Literal["system", "user", "assistant"] = "system" if message.role == "developer" else message.role
    return core.Message(role, "\n".join(part.text for part in message.content))


def _alternatives(body: ChatBody) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


def _sampling(body: _Generation, max_tokens: int | None, logprobs: int | None) -> core.Sampling:
    if body.stream_options is not None and not body.stream:
        raise core.RequestError("stream_options needs stream: true", param="stream_options")
    fields: Json = {
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "stop": None if body.stop is None else tuple(body.stop),
    }
    return core.Sampling(**{k: v for k, v in fields.items() if v is not None}, logprobs=logprobs)


def _rag(body: RagBody) -> core.Rag:
    documents = None if body.documents is None else tuple(_document(d) for d in body.documents)
    return core.Rag(knowledge=body.knowledge, top_k=body.top_k, strategy=body.strategy, documents=documents)


def _rag_without_retrieval(body: RagBody) -> core.Rag:
    for name in ("knowledge", "top_k", "documents"):
        if getattr(body, name) is not None:
            message = f"/v1/completions retrieves nothing: send rag.{name} to /v1/chat/completions"
            raise core.RequestError(message, param=f"rag.{name}", code="unsupported_value")
    return core.Rag(top_k=0, strategy=body.strategy)


def _document(document: str | InlineDocument) -> str | core.Document:
    if isinstance(document, str):
        return document
    return core.Document(document.id, document.text, document.title)


# --------------------------------------------------------------------------------- response bodies


def _choice(finish_reason: str | None, logprobs: Json | None, **more: Any) -> Json:
    return {"index": 0, **more, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(answer: core.Answer) -> Json:
    completion = len(answer.tokens)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _account(answer: core.Answer) -> Json:
    """The `rag` field of a response."""
    timings = answer.timings
    return {
        "strategy": answer.strategy,
        "exact_to": answer.exact_to,
        "segments": [_segment(report) for report in answer.segments],
        "timings_ms": {
            name: round(float(getattr(timings, name)), 3) for name in ("retrieve", "load", "prefill", "ttft")
        },
    }


def _segment(report: core.SegmentReport) -> Json:
    return {
        "id": report.id,
        "title": report.title,
        "tokens": report.tokens,
        "reused": report.reused,
        "recomputed": report.recomputed,
        "tier": report.tier,
        "score": None if report.score is None else float(report.score),
    }


def _logprob(value: float) -> float:
    # JSON has no -inf; OpenAI writes -9999.0 for a token of (almost) no probability.
    return max(float(value), -9999.0)


def _token(text: str, logprob: float) -> Json:
    # A token may be a piece of a character: its text then holds a replacement mark, and its bytes are unknown here.
    known = "\ufffd" not in text
    return {"token": text, "logprob": _logprob(logprob), "bytes": list(text.encode()) if known else None}


def _chat_logprobs(tokens: Iterable[core.TokenLogprob]) -> Json:
    return {"content": [_chat_logprob(t) for t in tokens], "refusal": None}


def _chat_logprob(token: core.TokenLogprob) -> Json:
    return {
        **_token(token.token, token.logprob),
        "top_logprobs": [_token(text, value) for text, _, value in token.top],
    }


def _text_logprobs(tokens: Sequence[core.TokenLogprob], offset: int = 0) -> Json:
    """The legacy form: parallel lists. `text_offset` counts characters of the answer from `offset` on."""
    offsets = [offset + sum(len(t.token) for t in tokens[:i]) for i in range(len(tokens))]
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [_logprob(t.logprob) for t in tokens],
        "top_logprobs": [_alternative_logprobs(t) for t in tokens],
        "text_offset": offsets,
    }


def _alternative_logprobs(token: core.TokenLogprob) -> dict[str, float]:
    # Two tokens may read the same; the likelier one comes first and is kept.
    found = {token.token: _logprob(token.logprob)}
    for text, _, value in token.top:
        found.setdefault(text, _logprob(value))
    return found


@dataclass(frozen=True)
class _Frame:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def around(self, kind: str, choice: Json, **more: Any) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": [choice], "system_fingerprint": self.fingerprint, **more}


def _frame(engine: ServedEngine, prefix: str) -> _Frame:
    setting = f"{engine.model_name}\n{engine.context_length}\n{engine.default_strategy}"
    digest = hashlib.blake2s(setting.encode(), digest_size=5).hexdigest()
    return _Frame(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), engine.model_name, f"fp_{digest}")


class _Form(Protocol):
    """How one response is put: whole, or as the chunks of a stream."""

    def whole(self, answer: core.Answer) -> Json: ...

    def opening(self) -> list[Json]: ...

    def delta(self, delta: core.Delta) -> Json: ...

    def closing(self, answer: core.Answer) -> Json: ...


class _ChatForm:
    """Chat completions."""

    def __init__(self, frame: _Frame, want_logprobs: bool):
        self._frame = frame
        self._want_logprobs = want_logprobs

    def whole(self, answer: core.Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        choice = _choice(answer.finish_reason, self._logprobs(answer.logprobs), message=message)
        return self._frame.around("chat.completion", choice, usage=_usage(answer), rag=_account(answer))

    def opening(self) -> list[Json]:
        return [self._chunk(_choice(None, None, delta={"role": "assistant", "content": "", "refusal": None}))]

    def delta(self, delta: core.Delta) -> Json:
        return self._chunk(_choice(None, self._logprobs(delta.logprobs), delta={"content": delta.text}))

    def closing(self, answer: core.Answer) -> Json:
        return self._chunk(_choice(answer.finish_reason, None, delta={}), rag=_account(answer))

    def _chunk(self, choice: Json, **more: Any) -> Json:
        return self._frame.around("chat.completion.chunk", choice, **more)

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json | None:
        return _chat_logprobs(tokens) if self._want_logprobs else None


class _TextForm:
    """Text completions, whose chunks look like the whole."""

    def __init__(self, frame: _Frame, want_logprobs: bool):
        self._frame = frame
        self._want_logprobs = want_logprobs
        self._offset = 0

    def whole(self, answer: core.Answer) -> Json:
        choice = _choice(answer.finish_reason, self._logprobs(answer.logprobs), text=answer.text)
        return self._object(choice, usage=_usage(answer), rag=_account(answer))

    def opening(self) -> list[Json]:
        return []

    def delta(self, delta: core.Delta) -> Json:
        return self._object(_choice(None, self._logprobs(delta.logprobs), text=delta.text))

    def closing(self, answer: core.Answer) -> Json:
        return self._object(_choice(answer.finish_reason, None, text=""), rag=_account(answer))

    def _object(self, choice: Json, **more: Any) -> Json:
        return self._frame.around("text_completion", choice, **more)

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json | None:
        if not self._want_logprobs:
            return None
        begin = self._offset
        self._offset += sum(len(t.token) for t in tokens)
        return _text_logprobs(tokens, begin)


async def _chunks(
    form: _Form, events: AsyncGenerator[core.Event, None], include_usage: bool
) -> AsyncGenerator[Json, None]:
    """The chunks of a stream; the first waits for the first event, and so for the errors before it.

    With `include_usage`, each says `usage: null`, and one without choices follows with the sums.
    """
    more = {"usage": None} if include_usage else {}
    answer: core.Answer | None = None
    opened = False
    async with aclosing(events):
        async for event in events:
            if not opened:
                opened = True
                for chunk in form.opening():
                    yield {**chunk, **more}
            if isinstance(event, core.Answer):
                answer = event
            elif event.text or event.logprobs:
                yield {**form.delta(event), **more}
    answer = _given(answer)
    closing = form.closing(answer)
    yield {**closing, **more}
    if include_usage:
        yield {**{k: v for k, v in closing.items() if k != "rag"}, "choices": [], "usage": _usage(answer)}


async def _whole(form: _Form, events: AsyncGenerator[core.Event, None]) -> Json:
    answer: core.Answer | None = None
    async with aclosing(events):
        # To the end, not to the answer only: closing earlier would be a cancellation.
        async for event in events:
            answer = event if isinstance(event, core.Answer) else answer
    return form.whole(_given(answer))


def _given(answer: core.Answer | None) -> core.Answer:
    if answer is None:
        raise RuntimeError("the engine's events ended without an answer")
    return answer


# ------------------------------------------------------------------------------------------ errors


@dataclass
class ApiError(Exception):
    """An error as it goes out: HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> Json:
        """`{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The error as a response of its own."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


def _api_error(error: BaseException, scope: Scope) -> ApiError:
    """What to tell the client; an error that is not the client's is logged here and told by its request id only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, core.RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, core.OverloadError):
        return ApiError(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "1"})
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _route_error(error, scope)
    if isinstance(error, asyncio.CancelledError):
        message = "the server is stopping; try again later"
        return ApiError(503, message, "server_error", code="stopping", headers={"retry-after": "5"})
    request_id = scope["state"]["request_id"]
    _log.error("request %s failed", request_id, exc_info=error)
    message = f"internal error; the server's log has the details under request id {request_id}"
    return ApiError(500, message, "server_error", code="internal_error")


def _route_error(error: HTTPException, scope: Scope) -> ApiError:
    messages = {
        400: "the body cannot be read as JSON text in UTF-8",
        404: f"unknown URL: {scope['method']} {scope['path']}",
        405: f"{scope['method']} is not allowed on {scope['path']}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)


_HINTS = {
    "recompute_ratio": "no strategy of this server takes a recompute ratio yet",
    "tools": "tool calls are not implemented",
    "functions": "tool calls are not implemented",
    "logit_bias": "logit biases are not implemented",
    "suffix": "insertion is not implemented",
}


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind, location = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason} at character {location[0]}", code="invalid_json")
    if not location:
        return ApiError(
            400, f"the body must be a JSON object, sent with content-type: application/json ({first['msg']})"
        )
    path = _path(location)
    if kind == "extra_forbidden":
        hint = _HINTS.get(str(location[-1]))
        message = f"unknown field {path!r}" + (f": {hint}" if hint else "")
        return ApiError(400, message, param=path, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{path!r} is required", param=path, code="missing_required_parameter")
    return ApiError(400, f"{path}: {first['msg']}", param=path, code="invalid_value")


def _path(location: tuple[str | int, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; the tags of a union are no part of the body."""
    steps = location[:3] + location[4:] if location[:2] == ("rag", "documents") else location
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


# -------------------------------------------------------------------------------------- middleware


class _Observe:
    """Outermost: gives the request its id and arrival time, counts it, and answers what nobody else caught."""

    def __init__(self, app: ASGIApp, metrics: _Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        arrived = time.perf_counter()
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {}).update(arrived=arrived, request_id=request_id)
        status = 0

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except ClientDisconnect:
            _log.info("request %s: the client left", request_id)
        except (Exception, asyncio.CancelledError) as error:
            if not status:
                await _api_error(error, scope).response()(scope, receive, observed_send)
            elif not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            # 499 is the customary status of a client that left before the response began.
            self._metrics.saw_request(route, status or 499, time.perf_counter() - arrived)


class _RequireKey:
    """Refuses every request without the API key, except to /health."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await error.response()(scope, receive, send)


class _LimitBody:
    """Refuses a body over `limit` bytes, by its declared length before reading it, and by what arrives.

    uvicorn reads the rest away, so that a client that is still writing gets to read the answer.
    """

    def __init__(self, app: ASGIApp, limit: int):
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._limit:
            return await self._error().response()(scope, receive, send)
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                # FastAPI passes HTTPException through while it reads a body; the handler makes an ApiError of it.
                raise HTTPException(413, self._error().message)
            return message

        await self._app(scope, limited_receive, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limit / 2**20:g} MiB")


# ----------------------------------------------------------------------------------------- metrics

_HELP = {
    "requests_total": "Requests admitted, by strategy.",
    "prompt_tokens_total": "Prompt tokens of admitted requests.",
    "reused_tokens_total": "Prompt tokens whose keys and values came from the cache.",
    "recomputed_tokens_total": "Prompt tokens computed for the request, whether missing or repaired.",
    "generated_tokens_total": "Tokens generated.",
    "cancelled_total": "Requests cancelled before their answer was complete.",
    "errors_total": "Requests that failed inside the engine.",
    "fallbacks_total": "Requests served by another strategy than asked.",
    "evicted_tokens_total": "Tokens evicted from the cache.",
    "steps_total": "Steps of the engine's loop.",
    "overhead_ms_last": "Milliseconds that the last request spent outside compiled code.",
    "queue_depth": "Requests that wait for admission.",
    "running": "Requests admitted and not finished.",
    "pages_used": "Pages of the device pool in use.",
    "pages_total": "Pages of the device pool.",
}
# `_total` is the suffix of counters; the size of the pool is a gauge.
_GAUGES = {"pages_total": "pages_capacity"}
_LABELS = {"requests_total": "strategy"}

_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class _EngineCollector(Collector):
    """The engine's own counters and gauges, read at each scrape."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        return [_family(name, value) for name, value in self._engine.stats().items()]


def _family(name: str, value: float | Mapping[str, float]) -> Metric:
    label = _LABELS.get(name, "kind")
    labels = (label,) if isinstance(value, Mapping) else ()
    counts = name.endswith("_total") and name not in _GAUGES
    make = CounterMetricFamily if counts else GaugeMetricFamily
    family = make(f"ragjax_{_GAUGES.get(name, name)}", _HELP.get(name, name.replace("_", " ")), labels=labels)
    samples = value.items() if isinstance(value, Mapping) else [(None, value)]
    for key, number in samples:
        family.add_metric([] if key is None else [key], float(number))
    return family


class _Metrics:
    """The metrics of one app, in a registry of its own."""

    def __init__(self, engine: ServedEngine):
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self._requests = Counter(
            "ragjax_http_requests", "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "ragjax_http_request_seconds",
            "Seconds from a request's arrival to the end of its response.",
            ["route"],
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._ttft = Histogram(
            "ragjax_ttft_seconds",
            "Seconds from a request's arrival to its first text, by the strategy asked for.",
            ["strategy"],
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self._gaps = Histogram(
            "ragjax_inter_token_seconds",
            "Seconds between two deltas of one answer (nearly always one token each).",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )

    def saw_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def saw_first(self, strategy: str, seconds: float) -> None:
        self._ttft.labels(strategy).observe(seconds)

    def saw_gap(self, seconds: float) -> None:
        self._gaps.observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


# ----------------------------------------------------------------------------------------- serving


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; it is cancelled, and its clean-up awaited, as soon as the client leaves.

    Raises:
        ClientDisconnect: if the client left first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events of JSON chunks, then `[DONE]`.

    The response begins with the first chunk, so an error before it becomes an HTTP error; a later one
    becomes an event `{"error": …}` that ends the stream. The chunks are closed when the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[Json, None]):
        # x-accel-buffering: reverse proxies such as nginx would otherwise hold the events back.
        super().__init__((), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream (ASGI)."""
        await _while_connected(self._run(scope, send), receive)

    async def _run(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await _send_event(send, first)
                async for chunk in chunks:
                    await _send_event(send, chunk)
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            except (Exception, asyncio.CancelledError) as error:
                await _send_event(send, _api_error(error, scope).body())
                if isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                await send({"type": "http.response.body", "body": b""})


async def _send_event(send: Send, chunk: Json) -> None:
    data = json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _tenant(request: Request) -> str:
    """The tenant whose cache a request may share. One key, one tenant; many keys would be told apart here."""
    return ""


class _Server:
    """The endpoints over one engine."""

    def __init__(self, engine: ServedEngine, metrics: _Metrics):
        self._engine = engine
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self) -> Json:
        return {"status": "ok", "ready": True, "model": self._engine.model_name}

    async def metrics(self) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Json:
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> Json:
        self._check_model(model)
        return self._model()

    async def chat(self, body: ChatBody, request: Request) -> Response:
        self._check_model(body.model)
        form = _ChatForm(_frame(self._engine, "chatcmpl"), bool(body.logprobs))
        return await self._respond(form, _chat_request(body, _tenant(request)), body, request)

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        self._check_model(body.model)
        form = _TextForm(_frame(self._engine, "cmpl"), body.logprobs is not None)
        return await self._respond(form, _completion_request(body, _tenant(request)), body, request)

    async def _respond(self, form: _Form, asked: core.Request, body: _Generation, request: Request) -> Response:
        events = self._events(asked, request.state.arrived)
        if body.stream:
            return _EventStream(_chunks(form, events, bool(body.stream_options and body.stream_options.include_usage)))
        return JSONResponse(await _while_connected(_whole(form, events), request.receive))

    async def _events(self, request: core.Request, arrived: float) -> AsyncGenerator[core.Event, None]:
        """The engine's events, their times observed; nothing is submitted before the first is asked for."""
        strategy = (request.rag and request.rag.strategy) or self._engine.default_strategy
        last: float | None = None
        # The engine promises an iterator that can be closed, which is how a request is cancelled.
        async with aclosing(cast("AsyncGenerator[core.Event, None]", self._engine.submit(request))) as events:
            async for event in events:
                now = time.perf_counter()
                if last is None:
                    self._metrics.saw_first(strategy, now - arrived)
                elif isinstance(event, core.Delta):
                    self._metrics.saw_gap(now - last)
                last = now
                yield event

    def _check_model(self, name: str) -> None:
        if name != self._engine.model_name:
            message = f"the model {name!r} does not exist here; this server has {self._engine.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model(self) -> Json:
        engine = self._engine
        return {
            "id": engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "ragjax",
            "context_length": engine.context_length,
            "rag": {
                "knowledge": list(engine.knowledge_names),
                "strategies": list(engine.strategies),
                "default_strategy": engine.default_strategy,
            },
        }


def create_app(engine: ServedEngine, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The HTTP application over `engine`, which the caller closes once the app has stopped.

    Args:
        engine: a loaded engine; requests go to its `submit` on the app's event loop.
        api_key: if given, every route but /health wants it as a bearer token.
        max_body_bytes: limit of a request's body.
    """
    metrics = _Metrics(engine)
    server = _Server(engine, metrics)
    # No /docs and /redoc: their pages load scripts from elsewhere. A missing content-type counts as JSON.
    app = FastAPI(title="ragjax", docs_url=None, redoc_url=None, redirect_slashes=False, strict_content_type=False)
    app.add_api_route("/health", server.health)
    app.add_api_route("/metrics", server.metrics, response_class=Response)
    app.add_api_route("/v1/models", server.models)
    app.add_api_route("/v1/models/{model:path}", server.model)
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", server.completion, methods=["POST"], response_model=None)
    for kind in (ApiError, core.RequestError, core.OverloadError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    # The last one added is the first to see a request.
    app.add_middleware(_LimitBody, limit=max_body_bytes)
    if api_key is not None:
        app.add_middleware(_RequireKey, api_key=api_key)
    app.add_middleware(_Observe, metrics=metrics)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return _api_error(error, request.scope).response()


# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options:
    """The flags of the command line. grace is in seconds; knowledge is one source by its name, or None."""

    model: str
    knowledge: dict[str, str | Path] | None
    host: str
    port: int
    api_key: str | None
    dtype: Literal["float32", "bfloat16"]
    strategy: str
    top_k: int
    device_cache_gb: float
    max_queue: int
    max_body_mb: float
    max_context: int | None
    index: Literal["flat", "ivf", "hnsw"]
    grace: int
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise core.ConfigError(f"{message} (--help lists the flags)")


class _StoreOnce(argparse.Action):
    """A flag given twice is an error: argparse would drop the first silently."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given = namespace.__dict__.setdefault("given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line (`sys.argv` if None) and of the environment's RAGJAX_API_KEY.

    Raises:
        core.ConfigError: for an unknown or repeated flag, or a value that cannot work.
    """
    parser = _Parser(prog="python -m ragjax.serve", description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.register("action", None, _StoreOnce)
    flag = parser.add_argument
    flag("--model", default="smollm2-135m-instruct", help="name, folder, .gguf file or Hugging Face id (%(default)s)")
    flag("--knowledge", default="demo", help="folder or .jsonl of documents, 'demo' (default) or 'none'")
    flag("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    flag("--port", type=_integer(0, 65535), default=8000, help="port to listen on, 0: a free one (%(default)s)")
    flag("--api-key", help="key that clients must send (default: $RAGJAX_API_KEY, or no key)")
    flag("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="weights and KV (%(default)s)")
    flag("--strategy", default="prefix", help="how KV is reused unless a request says otherwise (%(default)s)")
    flag("--top-k", type=_integer(1), default=3, help="chunks retrieved unless a request says otherwise (%(default)s)")
    flag("--device-cache-gb", type=_positive, default=1.0, help="KV pool on the device, GB (%(default)s)")
    flag("--max-queue", type=_integer(1), default=64, help="requests that may wait; more get 429 (%(default)s)")
    flag("--max-body-mb", type=_positive, default=MAX_BODY_BYTES / 2**20, help="largest body, MiB (%(default)s)")
    flag("--max-context", type=_integer(1), help="tokens of prompt and answer together (default: the model's)")
    flag("--index", choices=("flat", "ivf", "hnsw"), default="flat", help="kind of the vector index (%(default)s)")
    flag("--grace", type=_integer(0), default=30, help="seconds that running requests get at a stop (%(default)s)")
    flag("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    values = vars(parser.parse_args(argv))
    values.pop("given", None)
    values["knowledge"] = _knowledge(values["knowledge"])
    values["api_key"] = _api_key(values["api_key"])
    return Options(**values)


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        with suppress(ValueError):
            value = int(text)
            if value >= low and (high is None or value <= high):
                return value
        raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, not {text!r}")

    return parse


def _positive(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if value > 0 and math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")


def _knowledge(value: str) -> dict[str, str | Path] | None:
    if value == "none":
        return None
    if value == "demo":
        return {"demo": Path(__file__).parent / "demo" / "documents"}
    source = Path(value)
    if not source.exists():
        raise core.ConfigError(f"--knowledge: {value!r} does not exist; give a folder, a .jsonl file, 'demo' or 'none'")
    return {source.resolve().stem: source}


def _api_key(flag: str | None) -> str | None:
    key = os.environ.get("RAGJAX_API_KEY") if flag is None else flag
    # A key that came out empty was meant to protect; an open server would be the wrong reading of it.
    if key is not None and not key.strip():
        raise core.ConfigError("the API key is empty: give one in --api-key or RAGJAX_API_KEY, or leave both away")
    return key


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket. It is taken before the model is loaded: an occupied port should not cost a minute."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_failure.pop_all()
            return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise core.ConfigError(f"cannot listen on {host}:{port}: {reason}") from error


_BACKLOG = 2048


def _run(app: FastAPI, listener: socket.socket, options: Options) -> None:
    """Serves until SIGTERM or SIGINT; running requests then get the grace time, and after it are cancelled."""
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=options.log_level,
        timeout_graceful_shutdown=options.grace,
        ws="none",
        lifespan="off",
        backlog=_BACKLOG,
    )
    server = uvicorn.Server(config)
    # uvicorn sets its own handlers; when done it restores these and raises the signal again, by then without harm.
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open(engine: ServedEngine, listener: socket.socket, options: Options) -> None:
    """Lets connections in, where they wait for the event loop, and says so."""
    listener.listen(_BACKLOG)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    knowledge = ", ".join(engine.knowledge_names) or "none"
    _log.info("%s ready at %s (knowledge: %s; strategy: %s)", engine.model_name, url, knowledge, options.strategy)
    if options.api_key is None and host not in ("127.0.0.1", "::1"):
        _log.warning("no API key is set, and %s can be reached from other machines", host)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0 after a graceful stop, 2 if it cannot start as asked."""
    try:
        options = parse_options(argv)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("ragjax").setLevel(options.log_level.upper())
        listener = _listener(options.host, options.port)
        # Imported late: a wrong flag should not wait for JAX.
        from ragjax.engine import Engine

        engine = Engine.load(
            options.model,
            knowledge=options.knowledge,
            strategy=options.strategy,
            dtype=options.dtype,
            top_k=options.top_k,
            device_cache_gb=options.device_cache_gb,
            max_queue=options.max_queue,
            max_context=options.max_context,
            index=options.index,
        )
    except core.RagjaxError as error:
        print(f"ragjax.serve: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        app = create_app(engine, api_key=options.api_key, max_body_bytes=int(options.max_body_mb * 2**20))
        _open(engine, listener, options)
        _run(app, listener, options)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
