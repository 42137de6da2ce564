"""HTTP server: OpenAI's API over an engine, with the account of what was reused.

    python -m ragjax.serve --model smollm2-135m-instruct --knowledge DIR_OR_JSONL

Requests and answers have the shapes of OpenAI's API reference, so its clients work unchanged; the field `rag`
extends both (docs/http.md). What would change the answer and cannot be had is refused by name; what changes nothing is
named in a notice, or refused with --strict (`ignored_fields.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragjax.serve.app import create_app
    from ragjax.serve.command import main

__all__ = ["create_app", "main"]


def __getattr__(name: str) -> object:
    # imported late, so that `python -m ragjax.serve` can say which packages are missing
    if name == "create_app":
        from ragjax.serve.app import create_app

        return create_app
    if name == "main":
        from ragjax.serve.command import main

        return main
    raise AttributeError(f"module 'ragjax.serve' has no attribute {name!r}")
