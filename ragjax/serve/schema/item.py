"""Items of a response's input: messages, calls of functions and what they gave, and items of earlier responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema.body import Body, FilledName, FunctionName, Name, Text, tag_of

Status = Literal["in_progress", "completed", "incomplete", "searching", "failed"]


class InputPart(Body):
    """One text part; images, audio and files are refused.

    annotations, logprobs: come back with the text of our own answers.
    """

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[
    Annotated[list[InputPart], Field(fail_fast=True)],
    BeforeValidator(_parts, json_schema_input_type=str | list[InputPart]),
]


class _Returned(Body):
    """id, status: come back with our own items."""

    id: Name | None = None
    status: Status | None = None


class InputMessage(_Returned):
    """A message; `developer` is OpenAI's newer name of `system`."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class FunctionCall(_Returned):
    """A call that the assistant made. arguments: as JSON text."""

    type: Literal["function_call"]
    call_id: FilledName
    name: FunctionName
    arguments: Text


class FunctionCallOutput(_Returned):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: FilledName
    output: Parts


class SearchCall(_Returned):
    """A search of an earlier response. Its passages are not read again: the next search finds its own."""

    type: Literal["file_search_call"]
    queries: list[Text] | None = None
    results: list[Any] | None = None


class Reasoning(_Returned):
    """What another model thought. It is not read."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: Text | None = None


ITEMS: Mapping[str, type[Body]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "file_search_call": SearchCall,
    "reasoning": Reasoning,
}
"""What an item of each type is."""


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[SearchCall, Tag("<file_search_call>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(tag_of("message")),
]


def messages_of(items: Sequence[Item], instructions: str | None = None) -> tuple[core.Message, ...]:
    """The chat that the items are: calls belong to the assistant's message before them.

    instructions: what the system says first.
    """
    found: list[core.Message] = [] if instructions is None else [core.Message("system", instructions)]
    calls: dict[int, list[core.ToolCall]] = {}  # of each message, by its place
    for item in items:
        if isinstance(item, InputMessage):
            found.append(core.Message("system" if item.role == "developer" else item.role, _text(item.content)))
        elif isinstance(item, FunctionCallOutput):
            found.append(core.Message("tool", _text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, FunctionCall):
            call = core.ToolCall(item.call_id, item.name, item.arguments)
            if not found or found[-1].role != "assistant":
                found.append(core.Message("assistant", ""))
            calls.setdefault(len(found) - 1, []).append(call)
    for place, made in calls.items():
        found[place] = replace(found[place], tool_calls=tuple(made))
    return tuple(found)


def _text(parts: Sequence[InputPart]) -> str:
    return "\n".join(part.text for part in parts)
