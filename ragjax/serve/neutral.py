"""Fields of OpenAI's API and of its clients that change nothing here.

They are taken out of a body, as parsed from JSON, before it is validated, and named in `rag.notices`. A field that
would change the answer and cannot be had is refused. What stands in `rag` is not looked at: there an unknown field is
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragjax.core import RequestError
from ragjax.serve.schema import (
    Body,
    CalledTool,
    ChatMessage,
    ChatTool,
    FunctionTool,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    TextPart,
)

KNOWN = frozenset(
    {
        *("metadata", "store", "parallel_tool_calls", "service_tier", "user", "reasoning_effort", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction", "messages[].name"),
        *("messages[].annotations", "stream_options.include_obfuscation"),
    }
)
"""Fields of OpenAI's API that have no effect here, whatever they say."""

NAMED = 16
"""Fields that a notice names, at most."""

NAME_CHARS = 64
"""Characters of a name that a notice shows, at most."""


EMPTY: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "messages[].tool_calls": ([],),
}
"""Values of fields that ask for nothing, as long as there are no tools."""


class Refusal(NamedTuple):
    """A field that cannot be had. unless: values that ask for nothing. advice: what to change."""

    advice: str
    unless: tuple[object, ...] = ()


_GRAMMAR = Refusal("use response_format with a json_schema instead")
_CHAT = Refusal("use /v1/chat/completions", ([],))
_TEXT = "this server reads and answers text: leave it out"
REFUSED: Mapping[str, Refusal] = {
    "functions": Refusal("use tools instead", ([],)),
    "function_call": Refusal("use tool_choice instead", ("none", "auto")),
    "web_search_options": Refusal("this server searches its own knowledge bases: use rag.knowledge instead"),
    "audio": Refusal(_TEXT),
    "modalities": Refusal('only ["text"] is answered', ([], ["text"])),
    "suffix": Refusal("text is continued at its end only: leave it out", ("",)),
    "min_p": Refusal("use top_p or top_k instead", (0, 0.0)),
    "min_tokens": Refusal("use logit_bias on the end of text instead", (0,)),
    "ignore_eos": Refusal("use logit_bias on the end of text instead", (False,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _GRAMMAR),
    "messages[].audio": Refusal(_TEXT),
    "messages[].function_call": Refusal("use tool_calls instead"),
    **dict.fromkeys(
        ("messages", "tools", "tool_choice", "response_format"), Refusal("use /v1/chat/completions", ([],))
    ),
    "prompt": Refusal("use messages, or /v1/completions"),
}
"""Fields that would change the answer."""


@dataclass
class _Found:
    """Fields taken out of a body, by path, in their order."""

    known: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)


def settle(body: object, form: type[Body]) -> tuple[str, ...]:
    """Take out of a body, in place, what changes nothing. The notices of it: which fields they were.

    Null counts as absent and makes no notice.

    Raises:
        RequestError: for a field that would change the answer, saying what to change.
    """
    found = _Found()
    toolless = not isinstance(body, dict) or not body.get("tools")
    for path, given, model in _levels(body, form):
        names = model.names()
        for name in list(given):
            if name not in names:
                _take(path, name, given.pop(name), found)
            elif _asks_nothing(path + name, given[name], toolless):  # it is validated all the same
                found.known[path + name] = None
    notices = (("no effect here", found.known), ("unknown and ignored", found.unknown))
    return tuple(_notice(what, list(fields)) for what, fields in notices if fields)


def _asks_nothing(path: str, value: object, toolless: bool) -> bool:
    if path in KNOWN:
        return value is not None
    return toolless and any(type(value) is type(x) and value == x for x in EMPTY.get(path, ()))


def _take(path: str, name: str, value: object, found: _Found) -> None:
    if value is None:
        return
    shown = path + name
    refusal = REFUSED.get(shown)
    if refusal is not None and not any(type(value) is type(x) and value == x for x in refusal.unless):
        param = shown.replace("[]", "")
        raise RequestError(f"{param} cannot be had: {refusal.advice}", param=param, code="unsupported_parameter")
    fields = found.known if refusal is not None or shown in KNOWN else found.unknown
    fields[path + name[:NAME_CHARS]] = None


def _notice(what: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"fields of the request, {what}: {', '.join(names[:NAMED])}{more}"


def _levels(body: object, form: type[Body]) -> Iterator[tuple[str, dict[str, Any], type[Body]]]:
    """The objects of a body that are looked at: their path, themselves, and what they are validated as."""
    if not isinstance(body, dict):
        return
    yield "", body, form
    if isinstance(options := body.get("stream_options"), dict):
        yield "stream_options.", options, StreamOptions
    if isinstance(wanted := body.get("response_format"), dict):
        yield "response_format.", wanted, ResponseFormat
        if isinstance(schema := wanted.get("json_schema"), dict):
            yield "response_format.json_schema.", schema, JsonSchema
    for tool in _objects(body.get("tools")):
        yield "tools[].", tool, ChatTool
        if isinstance(function := tool.get("function"), dict):
            yield "tools[].function.", function, FunctionTool
    for message in _objects(body.get("messages")):
        yield "messages[].", message, ChatMessage
        for call in _objects(message.get("tool_calls")):
            yield "messages[].tool_calls[].", call, CalledTool
        for part in _objects(message.get("content")):
            yield "messages[].content[].", part, TextPart


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
