"""What clients note with an object: metadata of responses and stores, attributes of files."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

Key = Annotated[str, Field(min_length=1, max_length=64)]
Value = Annotated[str, Field(min_length=0, max_length=512)]
Metadata = Annotated[dict[Key, Value], Field(max_length=16)]


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "<boolean>"
    return {str: "<string>", int: "<number>", float: "<number>"}.get(type(value), f"<{type(value).__name__}>")


Scalar = Annotated[
    Annotated[Value, Tag("<string>")] | Annotated[bool, Tag("<boolean>")] | Annotated[float, Tag("<number>")],
    Discriminator(_kind),
]
Attributes = Annotated[dict[Key, Scalar], Field(max_length=16)]
