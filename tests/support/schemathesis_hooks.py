"""Hooks of Schemathesis, which loads this file in a Python of its own: half of some fields have values that are served.

RAGJAX_KNOWN is a JSON object of these values, by the field of a body or the part of a path.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

KNOWN: dict[str, Any] = json.loads(os.environ["RAGJAX_KNOWN"])


def named(given: Any) -> Any:
    """The fields of an object, half of them with a known value."""
    if not isinstance(given, dict):
        return given
    return {name: KNOWN[name] if name in KNOWN and _half(value) else value for name, value in given.items()}


def _half(value: Any) -> bool:
    return zlib.crc32(repr(value).encode("utf-8", "replace")) % 2 == 0


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of a body."""
    return named(body)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Of a path, except to delete what it names."""
    return path_parameters if context.operation.method.upper() == "DELETE" else named(path_parameters)
