"""The page at `/`: its files, and the headers that keep what it shows from running (docs/page.md).

Plain HTML, CSS and JavaScript modules, sent as they lie here; nothing comes from another host. The page reads the same
endpoints as any client. It and its files need no API key: the key is asked for in the page.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HOME = "/"
"""Where the page is. Its files lie under `/page/`; all addresses in it are relative, for proxies that add a prefix."""

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

POLICY = {
    "default-src": "'self'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "object-src": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
"""Content security policy: no inline script or style, no other host, no frame, and no text that becomes markup."""

HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and not sent again if it is the same
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page, not sent again to a browser that has it."""

    body: bytes
    media_type: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tag = f'W/"{hashlib.sha256(self.body).hexdigest()[:16]}"'  # weak: one for the compressed form, too
        headers = {**HEADERS, "etag": tag}
        if tag in Headers(scope=scope).get("if-none-match", ""):
            return await Response(status_code=304, headers=headers)(scope, receive, send)
        await Response(self.body, headers={**headers, "content-type": self.media_type})(scope, receive, send)


def read() -> dict[str, PageFile]:
    found = {}
    for entry in files(__name__).iterdir():
        media_type = TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            found[HOME if entry.name == "index.html" else f"/page/{entry.name}"] = PageFile(
                entry.read_bytes(), media_type
            )
    return found
