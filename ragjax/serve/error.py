"""Errors as they go out: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from ragjax import core

_log = logging.getLogger(__name__)

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""Methods that a route may take."""


class ApiError(HTTPException):
    """An error as it goes out: HTTP status, headers, and the fields of OpenAI's error object."""

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

    def response(self) -> JSONResponse:
        """The error as a response of its own."""
        return JSONResponse(self.body, self.status_code, self.headers)


def api_error(error: BaseException, scope: Scope) -> ApiError:
    """What to tell the client. A request that failed inside the engine is logged here by its id; what was unforeseen
    is told by this id alone.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError | core.ClosedError):
        return stopping()
    if isinstance(error, core.OverloadError):
        seconds = str(max(1, math.ceil(error.retry_after or 1)))
        return ApiError(
            429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": seconds}
        )
    if isinstance(error, core.DeadlineError):
        _log.error("request %s failed: %s", scope["state"]["request_id"], error)
        return ApiError(504, str(error), "server_error", code="timeout")
    if isinstance(error, core.LostError):
        return ApiError(503, str(error), "server_error", code="replica_lost", headers={"retry-after": "1"})
    if isinstance(error, core.DamageError):
        return ApiError(500, str(error), "server_error", code="damaged")
    if isinstance(error, core.DeviceFullError):
        _log.error("request %s failed: %s", scope["state"]["request_id"], error)
        return ApiError(500, str(error), "server_error", code="device_full")
    if isinstance(error, core.MissingError):
        return ApiError(404, str(error), param=error.param, code=error.code)
    if isinstance(error, core.RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, core.RagjaxError):
        return ApiError(400, str(error))
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return _http_error(error, scope)
    request_id = scope["state"]["request_id"]
    _log.error("request %s failed", request_id, exc_info=error)
    message = f"internal error; the server's log has the details under request id {request_id}"
    return ApiError(500, message, "server_error", code="internal_error")


def stopping() -> ApiError:
    """What a request is told that comes while the server stops, or that it cannot end before."""
    message = "the server is stopping; try again later"
    return ApiError(503, message, "server_error", code="stopping", headers={"retry-after": "5"})


def late(seconds: float) -> ApiError:
    """What a client is told whose request does not arrive in time; the connection ends with it."""
    message = f"the request did not arrive within {seconds:g} seconds; send it faster, or less of it"
    return ApiError(408, message, code="timeout", headers={"connection": "close"})


def overloaded(connections: int) -> ApiError:
    """What a client is told whose connection is one too many; it ends with it."""
    message = f"the server has {connections} connections, its limit; try again later"
    headers = {"connection": "close", "retry-after": "5"}
    return ApiError(503, message, "server_error", code="overloaded", headers=headers)


def _http_error(error: HTTPException, scope: Scope) -> ApiError:
    reason = _unreadable(error.__cause__)
    if reason is not None:
        return ApiError(400, f"the body is not JSON that can be read: {reason}", code="invalid_json")
    headers = {"allow": _allowed(scope)} if error.status_code == 405 else error.headers
    return ApiError(error.status_code, f"{error.detail}: {scope['method']} {scope['path']}", headers=headers)


def _allowed(scope: Scope) -> str:
    """Methods of a path, of all its routes; Starlette names those of the first one."""
    found = (m for m in METHODS if any(_takes(route, {**scope, "method": m}) for route in scope["app"].routes))
    return ", ".join(found)


def _takes(route: BaseRoute, scope: Scope) -> bool:
    return route.matches(scope)[0] is Match.FULL


def _unreadable(cause: BaseException | None) -> str | None:
    """What is wrong with a body at which Python's parser failed; None if something else did."""
    if isinstance(cause, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(cause, RecursionError):
        return "it is nested too deeply"
    return "a number in it has too many digits" if isinstance(cause, ValueError) else None


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind, location, problem = first["type"], first["loc"][1:], first["msg"]
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason} at character {location[0]}", code="invalid_json")
    if not location:
        return ApiError(400, f"the body must be a JSON object, sent with content-type: application/json ({problem})")
    path = path_of(location)
    if kind == "union_tag_invalid":
        given, known = (first["ctx"][name].replace("<", "").replace(">", "") for name in ("tag", "expected_tags"))
        return ApiError(
            400, f"{path}: the type {given!r} is not served; these are: {known}", param=path, code="invalid_value"
        )
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {path!r}", param=path, code="unknown_parameter")
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return ApiError(400, f"{path}: {problem}", param=path, code=code)


def path_of(location: tuple[str | int, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; the tags of a union, written in <>, are no part of the body."""
    steps = [step for step in location if not (isinstance(step, str) and step[:1] == "<" and step[-1:] == ">")]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
