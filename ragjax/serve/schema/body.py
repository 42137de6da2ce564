"""The object of a body, and types of values that several bodies have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ragjax import core

NAME_CHARS = 1024
"""Characters of a name or stop string: every chunk of a document has its id and title."""

# With a length to check, pydantic refuses half of a surrogate pair: JSON can spell it, and no tokenizer takes it.
Text = Annotated[str, Field(min_length=0)]
Filled = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=0, max_length=NAME_CHARS)]
FilledName = Annotated[str, Field(min_length=1, max_length=NAME_CHARS)]
Count = Annotated[int, Field(ge=1)]
# Literal[1] would take true and 1.0, which are values of another type.
One = Annotated[int, Field(ge=1, le=1)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Body(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def names(cls) -> set[str]:
        """What its fields are called in JSON."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: object) -> object:
        """Of unknown fields the first alone: pydantic would make an error of each."""
        names = cls.names()
        if not isinstance(given, dict) or len(given) <= len(names):
            return given
        unknown = next(name for name in given if name not in names)
        return {name: given[name] for name in (*names, unknown) if name in given}


def tag_of(default: str) -> Callable[[object], str]:
    """Tells the members of a union apart by their `type`, given or made; default: where it is left out.

    Tags stand in <>, so that errors can leave them out of a field's path.
    """

    def tag(given: object) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind or default}>"

    return tag


def refuse_beside(kind: str, param: str, **members: object) -> None:
    """Refuse members of an object that its type has no use for.

    Raises:
        core.RequestError: naming the first that is given.
    """
    for name, value in members.items():
        if value is not None:
            reason = f"{param}.{name} does not go with the type {kind}: leave it out, or choose another type"
            raise core.RequestError(reason, param=f"{param}.{name}", code="invalid_value")


def as_json(value: object, param: str) -> str:
    """The value as JSON text.

    Raises:
        core.RequestError: if it is nested too deeply, or holds what JSON text cannot: NaN, an infinity, or half of a
            surrogate pair; it names `param`.
    """
    try:
        if core.is_unicode(json.dumps(value, allow_nan=False, ensure_ascii=False)):
            return json.dumps(value)
        reason = "holds half of a surrogate pair: write whole characters"
    except RecursionError:
        reason = "is nested too deeply"
    except ValueError:
        reason = "holds NaN or an infinity, which JSON does not have"
    raise core.RequestError(f"{param} {reason}", param=param, code="invalid_schema")


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
