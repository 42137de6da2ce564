"""ASGI middleware: request id, key and tenant, limits of a body, counters, and pages of a browser that may call."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragjax.serve.error import ApiError, api_error, late, stopping
from ragjax.serve.metric import ServerMetrics
from ragjax.serve.server import Drain

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which a browser calls a server on its own machine."""


@dataclass(frozen=True)
class BrowserGuard:
    """Refuses pages of a browser that may not call. Requests of other programs have no such headers, and pass.

    A browser sends requests for any page that it shows, also to addresses that only its own machine reaches. A page of
    another site must not use that: neither by a request whose answer it cannot read (cross-site request forgery), nor
    by a name of its own that it has resolve to the server's address (DNS rebinding).
    """

    origins: Collection[str] = ()  # of pages elsewhere that may call; "*": all
    hosts: Collection[str] | None = None  # names that the server may be called by, in lower case; None: any

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host and self.hosts is not None and _name(host) not in self.hosts:
            remedy = f"call it by its address, or start it with --allow-host {_name(host)}, or with --api-key"
            reason = f"this server does not go by the name {_name(host)!r}: {remedy}"
            raise ApiError(403, reason, code="host_not_allowed")
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site")
        elsewhere = origin not in (f"http://{host}", f"https://{host}") if origin else site == b"cross-site"
        # "same-origin" is the browser's word, also where a proxy has changed the host
        if elsewhere and site != b"same-origin" and not {"*", origin} & set(self.origins):
            remedy = f"start it with --cors-origin {origin or 'ORIGIN'}, or with --api-key"
            reason = f"pages {f'of {origin}' if origin else 'elsewhere'} may not call this server: {remedy}"
            raise ApiError(403, reason, code="origin_not_allowed")


def _name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


_log = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestMiddleware:
    """Gives a request its id, arrival time and tenant, checks its key and size, counts it, and answers errors.

    A body over the limit is refused by its declared length before it is read, and by what arrives. uvicorn reads the
    rest away, so that a client that is still writing gets to read the answer.
    """

    app: ASGIApp  # behind it
    metrics: ServerMetrics  # counts requests
    keys: Mapping[str, str]  # API keys, and the tenant of each; without any, everybody whom `guard` lets pass may enter
    guard: BrowserGuard
    max_body_bytes: int
    max_file_bytes: int  # of an upload
    timeout: float  # seconds in which a body must arrive
    drain: Drain
    public: Collection[str]  # paths that need no key
    metrics_key: str | None  # opens /metrics, and nothing else; None: it is as the other paths
    proxied: bool  # a proxy in front gives and sets the header x-request-id

    def __post_init__(self) -> None:
        self._tenants = {key.encode(): tenant for key, tenant in self.keys.items()}
        self._scrapers = self._tenants if self.metrics_key is None else {self.metrics_key.encode(): ""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        arrived = time.perf_counter()
        given = dict(scope["headers"]).get(b"x-request-id") if self.proxied else None
        request_id = given.decode("latin-1") if given else uuid.uuid4().hex
        scope.setdefault("state", {}).update(arrived=arrived, request_id=request_id, tenant="")
        status = 0

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not given:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        self.drain.serving += 1
        try:
            self._check(scope)
            await self.app(scope, self._limited(receive, self._most(scope)), observed_send)
        except ClientDisconnect:
            _log.info("request %s: the client left", request_id)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if not status:
                await api_error(error, scope).response(scope["path"])(scope, receive, observed_send)
            elif not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self.drain.serving -= 1
            route = getattr(scope.get("route"), "path", "unknown")
            # 499 is the customary status of a client that left before the response began.
            self.metrics.requests.labels(route, str(status or 499)).inc()
            self.metrics.request_seconds.labels(route).observe(time.perf_counter() - arrived)

    def _check(self, scope: Scope) -> None:
        if self.drain.stopping and scope["path"] != "/metrics":
            raise stopping()
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # a proxy may go by the other of the two: what follows could be a request that it has not seen
            reason = "content-length and transfer-encoding do not go together: send one of them"
            raise ApiError(400, reason, headers={"connection": "close"})
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "bodies are read as they are: send this one without content-encoding")
        if scope["path"] not in self.public:
            if tenants := self._scrapers if scope["path"] == "/metrics" else self._tenants:
                scope["state"]["tenant"] = _tenant_of(headers, tenants)
            else:
                self.guard.check(headers)
        _check_size(int(headers.get(b"content-length", b"0")), self._most(scope))

    def _most(self, scope: Scope) -> int:
        return self.max_file_bytes if scope["path"] == "/v1/files" else self.max_body_bytes

    def _limited(self, receive: Receive, most: int) -> Receive:
        received, whole = 0, False
        end = asyncio.get_running_loop().time() + self.timeout

        async def limited_receive() -> Message:
            nonlocal received, whole
            try:
                # after the body comes the client's leaving, which may take as long as it likes
                async with asyncio.timeout_at(None if whole else end):
                    message = await receive()
            except TimeoutError:
                raise late(self.timeout) from None
            whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            _check_size(received, most)
            return message

        return limited_receive


def _tenant_of(headers: Mapping[bytes, bytes], tenants: Mapping[bytes, str]) -> str:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    given = key if scheme.lower() == b"bearer" else b""
    given = headers.get(b"x-api-key") or given  # Anthropic's clients send the key alone
    # every key is compared, so that the time taken tells nothing
    matching = [tenant for key, tenant in tenants.items() if hmac.compare_digest(given, key)]
    if not matching:
        message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return matching[0]


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ApiError(413, f"the body is larger than {most / 2**20:g} MiB")
