"""The object of a body, and types of values that several bodies have."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from ragjax import core

NAME_CHARS = 1024
"""Characters of a name or stop string: every chunk of a document has its id and title."""

# With a length to check, pydantic refuses half of a surrogate pair: JSON can spell it, and no tokenizer takes it.
Text = Annotated[str, Field(min_length=0)]
Filled = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=0, max_length=NAME_CHARS)]
FilledName = Annotated[str, Field(min_length=1, max_length=NAME_CHARS)]
Count = Annotated[int, Field(ge=1)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # one error is told
# Literal[1] would take true and 1.0, which are values of another type.
MOST_ENTRIES = 2**14
"""Entries of a list that stands in the prompt, at most: each costs a token or more, and 25 microseconds to validate."""
TOO_LONG = "context_length_exceeded"
"""Code of an error about more than any context holds."""
TEXT_ONLY = "this server reads and answers text: leave it out"
One = Annotated[int, Field(ge=1, le=1)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Body(BaseModel):
    """An object of a body. Fields that it does not have are kept for `ignored_fields.take_ignored`."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},  # for clients: none of them has an effect
    )

    no_effect: ClassVar[Collection[str]] = ()  # fields of OpenAI's API that change nothing here

    def in_vain(self) -> Iterator[str]:
        """Names the fields of the schema that were given and have no effect."""
        return (name for name in type(self).model_fields if name in self.no_effect and getattr(self, name) is not None)


class ClosedBody(Body):
    """An object in which an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: object) -> object:
        """Keeps the first unknown field only: pydantic would make an error of each."""
        names = cls.model_fields.keys()
        if not isinstance(given, dict) or len(given) <= len(names):
            return given
        unknown = next(name for name in given if name not in names)
        return {name: given[name] for name in (*names, unknown) if name in given}


class Refusal(NamedTuple):
    """Why a field cannot be had."""

    advice: str  # what to change
    unless: tuple[object, ...] = ()  # values that ask for nothing


class RefusingBody(Body):
    """An object in which some fields would change the answer and cannot be had."""

    refused: ClassVar[Mapping[str, Refusal]] = {}
    path: ClassVar[str] = ""  # where the object stands in a body

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: object) -> object:
        for name, value in given.items() if isinstance(given, dict) else ():
            refusal = cls.refused.get(name)
            if refusal is None or value is None or any(type(value) is type(x) and value == x for x in refusal.unless):
                continue
            param = cls.path + name
            raise core.RequestError(
                f"{param} cannot be had: {refusal.advice}", param=param, code="unsupported_parameter"
            )
        return given


def at_most(
    most: int, entries: str, advice: str, *, field: str, within: Sequence[str] = (), code: str = "invalid_value"
) -> BeforeValidator:
    """Refuses a list or object with too many entries before they are validated.

    most: how many it may hold. entries: what they are called. advice: what to change. field: path of the list in a
    body. within: count the entries of these lists of each entry instead, all together. code: of the error.
    """

    def check(given: object) -> object:
        count = len(given) if isinstance(given, list | dict) else 0
        if within and isinstance(given, list):
            objects = [entry for entry in given if isinstance(entry, dict)]
            count = sum(len(x) for entry in objects for name in within if isinstance(x := entry.get(name), list))
        if count > most:
            param = field.replace("[]", "")
            raise core.RequestError(
                f"{field} has {count} {entries}; at most {most} are taken. {advice}", param=param, code=code
            )
        return given

    return BeforeValidator(check)


def texts_as(kind: str, given: object) -> BeforeValidator:
    """Takes a text for a list of one part of this type. given: the type that clients are told of."""

    def parts(content: object) -> object:
        for part in content if isinstance(content, list) else ():
            other = part.get("type") if isinstance(part, dict) else None
            if other in ("image_url", "input_audio", "video_url", "file"):
                raise ValueError(f"{other} is not read, here or in earlier turns: {TEXT_ONLY}")
        return [{"type": kind, "text": content}] if isinstance(content, str) else content

    return BeforeValidator(parts, json_schema_input_type=given)


def tag_of(default: str) -> Callable[[object], str]:
    """Tells the members of a union apart by their `type`, given or made; default: where it is left out.

    Tags stand in <>, so that errors can leave them out of a field's path.
    """

    def tag(given: object) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind or default}>"

    return tag


def refuse_beside(kind: str, param: str, **members: object) -> None:
    """Refuse members of an object that its type has no use for."""
    for name, value in members.items():
        if value is not None:
            reason = f"{param}.{name} does not go with the type {kind}: leave it out, or choose another type"
            raise core.invalid(f"{param}.{name}", reason)


def as_json(value: object, param: str) -> str:
    """The value as JSON text."""
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
