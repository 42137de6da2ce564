"""The OpenAPI document: the routes and bodies as FastAPI finds them, and the errors that are really sent."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ragjax import core
from ragjax.serve.library import ANCHOR, LEAST_SECONDS, MOST_SECONDS, SECONDS
from ragjax.serve.response import Json

ERRORS = {
    400: "the request cannot be served as asked; `param` names the field",
    401: "the API key is missing or wrong",
    403: "a page elsewhere may not call a server without API keys",
    404: "there is no such thing, or not for this key",
    413: "the body is too large",
    429: "the queue is full; see retry-after",
    500: "internal error",
    503: "the server is stopping; see retry-after",
    507: "the disk of the server is full",
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
NAMING = (*GENERATING, "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/v1/vector_stores")
"""Routes whose bodies name a model or files, which may not be there."""
ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": list(core.PURPOSES)},
        ANCHOR: {"enum": ["created_at"]},
        SECONDS: {"type": "integer", "minimum": LEAST_SECONDS, "maximum": MOST_SECONDS},
    },
    "dependentRequired": {ANCHOR: [SECONDS], SECONDS: [ANCHOR]},
}
CONTENT = ("application/pdf", "text/html", "text/markdown", "text/plain", "application/octet-stream")
"""What a file's bytes are sent as."""
UNUSED = ("HTTPValidationError", "ValidationError")


def describe(app: FastAPI) -> None:
    def document() -> Json:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _corrected(made)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _corrected(document: Json) -> Json:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in UNUSED:
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    document["paths"]["/v1/files"]["post"]["requestBody"] = {
        "required": True,
        "content": {"multipart/form-data": {"schema": UPLOAD}},
    }
    sent = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in CONTENT}
    document["paths"]["/v1/files/{file_id}/content"]["get"]["responses"]["200"]["content"] = sent
    for path in GENERATING:
        document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string"}
        }
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            route["responses"].pop("422", None)
            error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
            for status in sorted(_sent(path, method, route)):
                route["responses"][str(status)] = {"description": ERRORS[status], "content": error}
    return document


def _sent(path: str, method: str, route: Json) -> set[int]:
    if path == "/health":
        return {503}
    found = {401, 403, 500} if path == "/metrics" else {401, 403, 500, 503}
    asks = any(parameter["in"] == "query" for parameter in route.get("parameters", ()))
    if method != "get" or asks:
        found.add(400)
    if method == "post":
        found.add(413)
    if "{" in path or path in NAMING or asks:  # a list's `after` names an entry
        found.add(404)
    if path.startswith(("/v1/files", "/v1/vector_stores")) and method in ("post", "delete"):
        found.add(507)
    if path in ("/v1/embeddings", "/v1/rerank"):
        found.add(429)
    return found | {429} if path in GENERATING else found
