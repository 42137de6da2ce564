"""What every request passes before its endpoint: observation, the API key, the limit of its body."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragjax.serve.error import ApiError, api_error
from ragjax.serve.metric import Metrics

_log = logging.getLogger(__name__)


class Observe:
    """Outermost: gives the request its id and arrival time, counts it, and answers what nobody else caught."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
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
                await api_error(error, scope).response()(scope, receive, observed_send)
            elif not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            # 499 is the customary status of a client that left before the response began.
            self._metrics.requests.labels(route, str(status or 499)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - arrived)


class RequireKey:
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


class LimitBody:
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
