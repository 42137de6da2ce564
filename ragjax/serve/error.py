"""Errors as they go out: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from ragjax import core

_log = logging.getLogger(__name__)

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Methods that a route may take."""


UNREADABLE: Mapping[type[Exception], str] = {
    UnicodeDecodeError: "it is not UTF-8",
    RecursionError: "it is nested too deeply",
    ValueError: "a number in it has too many digits",
}
"""Why Python's parser fails at a body, the first that fits."""

FAILURES: Mapping[type[BaseException], tuple[int, str]] = {
    core.LostError: (503, "replica_lost"),
    core.EndpointError: (502, "endpoint"),
    core.DamageError: (500, "damaged"),
    core.DeviceFullError: (500, "device_full"),
    core.DiskFullError: (507, "disk_full"),
}
"""Status and code of failures that are not the request's."""


class ApiError(HTTPException):
    def __init__(
        self,
        status: int,
        message: str,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message, param = core.readable(message), None if param is None else core.readable(param)
        super().__init__(status, message, headers)
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self, path: str = "") -> JSONResponse:
        """The answer on a path: in Anthropic's form on those of its API."""
        body = in_anthropics_form(self) if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status_code, self.headers)


KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by status; all others are `api_error`."""


def in_anthropics_form(error: ApiError) -> dict[str, Any]:
    kind = KINDS.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return {"type": "error", "error": {**error.body["error"], "type": kind}}


def api_error(error: BaseException, scope: Scope) -> ApiError:
    """Returns the error that the client is told.

    A failure inside the engine is logged by the request id; of an unforeseen one the client gets this id alone.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError | core.ClosedError):
        return stopping()
    if isinstance(error, core.OverloadError):
        retry = {"retry-after": str(max(1, math.ceil(error.retry_after or 1)))}
        return ApiError(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers=retry)
    if (failure := FAILURES.get(type(error))) is not None:
        _log.error("request %s failed: %s", scope["state"]["request_id"], error)
        status, code = failure
        headers = {"retry-after": "1"} if status == 503 else None
        return ApiError(status, str(error), "server_error", code=code, headers=headers)
    if isinstance(error, core.RequestError):
        status = 404 if isinstance(error, core.MissingError) else 400
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, core.RagjaxError) and not isinstance(error, core.ConfigError):  # that is the server's fault
        return ApiError(400, str(error))
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        for kind, reason in UNREADABLE.items():
            if isinstance(error.__cause__, kind):
                return ApiError(400, f"the body is not JSON that can be read: {reason}", code="invalid_json")
        more = error.headers
        if error.status_code == 405:  # of all routes of a path; Starlette names the methods of the first one
            asked = {method: {**scope, "method": method} for method in METHODS}
            routes = scope["app"].routes
            known = (name for name, one in asked.items() if any(r.matches(one)[0] is Match.FULL for r in routes))
            more = {"allow": ", ".join(known)}
        return ApiError(error.status_code, f"{error.detail}: {scope['method']} {scope['path']}", headers=more)
    request_id = scope["state"]["request_id"]
    _log.error("request %s failed", request_id, exc_info=error)
    message = f"internal error; the server's log has the details under request id {request_id}"
    return ApiError(500, message, "server_error", code="internal_error")


def stopping() -> ApiError:
    """503 for requests that come while the server stops, or do not end before it does."""
    message = "the server is stopping; try again later"
    return ApiError(503, message, "server_error", code="stopping", headers={"retry-after": "5"})


def late(seconds: float) -> ApiError:
    """408 for a request that does not arrive in time; it ends the connection."""
    message = f"the request did not arrive within {seconds:g} seconds; send it faster, or less of it"
    return ApiError(408, message, code="timeout", headers={"connection": "close"})


def overloaded(connections: int) -> ApiError:
    """503 for one connection too many; it ends the connection."""
    message = f"the server has {connections} connections, its limit; try again later"
    headers = {"connection": "close", "retry-after": "5"}
    return ApiError(503, message, "server_error", code="overloaded", headers=headers)


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind, location, problem = first["type"], first["loc"][1:], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason} at character {location[0]}", code="invalid_json")
    if not location:
        return ApiError(400, f"the body must be a JSON object, sent with content-type: application/json ({problem})")
    path = path_of(location)
    if kind == "union_tag_invalid":
        given, known = (first["ctx"][name].replace("<", "").replace(">", "") for name in ("tag", "expected_tags"))
        problem = f"the type {given!r} is not served; these are: {known}"
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {path!r}", param=path, code="unknown_parameter")
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return ApiError(400, f"{path}: {problem}", param=path, code=code)


def path_of(location: tuple[str | int, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; the tags of a union, written in <>, are no part of the body."""
    steps = [step for step in location if not (isinstance(step, str) and step[:1] == "<" and step[-1:] == ">")]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
