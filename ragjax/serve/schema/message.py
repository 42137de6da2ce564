"""Messages of a chat."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ragjax import core
from ragjax.serve.schema.body import Body, FilledName, FunctionName, Name, Text


def _parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _no_refusal(refusal: object) -> object:
    if refusal is not None:
        raise ValueError("send what was said as content")
    return refusal


class TextPart(Body):
    """One text part of a message; images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    """What was called: the name of a function, and its arguments as JSON text."""

    name: FunctionName
    arguments: Text


class CalledTool(Body):
    """A call that the assistant made."""

    id: FilledName
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    """One message. `developer` is OpenAI's newer name of `system`; `refusal` comes back null with our own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True)] | None,
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    refusal: Annotated[None, BeforeValidator(_no_refusal)] = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    @field_validator("content")
    @classmethod
    def _said(cls, content: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("only an assistant's message may have no content; give a text")
        return content

    def to_core(self) -> core.Message:
        """The message, its parts as lines."""
        role = "system" if self.role == "developer" else self.role
        calls = [core.ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        text = "\n".join(part.text for part in self.content or ())
        return core.Message(role, text, tuple(calls), self.tool_call_id)
