"""Errors as they go out: an HTTP status and OpenAI's error object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ragjax import core

_log = logging.getLogger(__name__)

# Said behind the error of a field of this name.
_HINTS = {
    "recompute_ratio": "no strategy of this server takes a recompute ratio yet",
    "n": "send several requests",
    "best_of": "send several requests",
    "echo": "put the prompt before the text yourself",
    "presence_penalty": "penalties are not implemented",
    "frequency_penalty": "penalties are not implemented",
    "tools": "tool calls are not implemented",
    "functions": "tool calls are not implemented",
    "logit_bias": "logit biases are not implemented",
    "suffix": "insertion is not implemented",
}


@dataclass
class ApiError(Exception):
    """An error as it goes out: HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response of its own."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


def api_error(error: BaseException, scope: Scope) -> ApiError:
    """What to tell the client; an error that is not the client's is logged here and told by its request id only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, core.OverloadError):
        return ApiError(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "1"})
    if isinstance(error, core.RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, core.RagjaxError):
        return ApiError(400, str(error))
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


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind, location, problem = first["type"], first["loc"][1:], first["msg"]
    if kind == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason} at character {location[0]}", code="invalid_json")
    if not location:
        return ApiError(400, f"the body must be a JSON object, sent with content-type: application/json ({problem})")
    path = _path(location)
    message, code = {
        "extra_forbidden": (f"unknown field {path!r}", "unknown_parameter"),
        "missing": (f"{path!r} is required", "missing_required_parameter"),
    }.get(kind, (f"{path}: {problem}", "invalid_value"))
    hint = _HINTS.get(path.rpartition(".")[2])
    return ApiError(400, f"{message} ({hint})" if hint else message, param=path, code=code)


def _path(location: tuple[str | int, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`; the tags of a union are no part of the body."""
    steps = location[:3] + location[4:] if location[:2] == ("rag", "documents") else location
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
