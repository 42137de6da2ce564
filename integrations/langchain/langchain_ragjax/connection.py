"""Where the server is, and the key it wants. A variable or an argument that is empty counts as unset."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BeforeValidator, SecretStr

URL = "http://127.0.0.1:8000"


def base_url() -> str:
    """`RAGJAX_BASE_URL`, with its `/v1` or without, or a server on this machine."""
    given = os.environ.get("RAGJAX_BASE_URL") or URL
    return given.rstrip("/").removesuffix("/v1") + "/v1"


def api_key() -> SecretStr:
    """`RAGJAX_API_KEY`, or a word for servers that want no key."""
    return SecretStr(os.environ.get("RAGJAX_API_KEY") or "none")


# Left empty or None, these two would be OpenAI's: its address, and the key of OPENAI_API_KEY.
BaseUrl = Annotated[str, BeforeValidator(lambda given: given or base_url())]
ApiKey = Annotated[SecretStr, BeforeValidator(lambda given: given or api_key())]
