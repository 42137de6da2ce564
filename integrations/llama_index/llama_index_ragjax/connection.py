"""Where the server is, and the key it wants. A variable that is set but empty counts as unset."""

from __future__ import annotations

import os

URL = "http://127.0.0.1:8000"


def base_url() -> str:
    """`RAGJAX_BASE_URL`, with its `/v1` or without, or a server on this machine."""
    given = os.environ.get("RAGJAX_BASE_URL") or URL
    return given.rstrip("/").removesuffix("/v1") + "/v1"


def api_key() -> str:
    """`RAGJAX_API_KEY`, or a word for servers that want no key."""
    return os.environ.get("RAGJAX_API_KEY") or "none"
