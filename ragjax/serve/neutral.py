"""Fields of OpenAI's API and of its clients that change nothing here.

They are taken out of a body, as parsed from JSON, before it is validated, and named in `rag.notices`. A field that
would change the answer and cannot be had is refused. What stands in `rag` is not looked at: there an unknown field is
an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ragjax.core import RequestError, readable
from ragjax.serve.schema import (
    ITEMS,
    LOGPROBS,
    RESULTS,
    Body,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatTool,
    Comparison,
    Compound,
    FunctionTool,
    InputMessage,
    InputPart,
    JsonSchema,
    NamedFunction,
    Ranking,
    ResponseBody,
    ResponseChoice,
    ResponseFormat,
    ResponseTool,
    SearchTool,
    StreamOptions,
    TextConfig,
    TextFormat,
    TextPart,
    ToolChoice,
)
from ragjax.serve.schema.store import DEPTH

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
    **dict.fromkeys(("messages", "tools", "tool_choice", "response_format"), _CHAT),
    "prompt": Refusal("use messages, or /v1/completions"),
}
"""Fields that would change the answer."""


RESPONSE_KNOWN = (KNOWN - {"metadata"}) | {"reasoning", "max_tool_calls", "text.verbosity", "stream_options"}
"""The same of the Responses API: `metadata` comes back, and `store` has no effect since no response is kept."""

_SEND = Refusal("responses are not kept: send the earlier items in input instead")
RESPONSE_REFUSED: Mapping[str, Refusal] = {
    "previous_response_id": _SEND,
    "conversation": _SEND,
    "background": Refusal("a response is made while the client waits: leave it out", (False,)),
    "truncation": Refusal('only "disabled" is served: shorten the input', ("disabled",)),
    "prompt": Refusal("prompts are not kept: use instructions and input"),
    "messages": Refusal("use input"),
    "response_format": Refusal("use text.format"),
    "max_tokens": Refusal("use max_output_tokens"),
    **{name: REFUSED[name] for name in ("audio", "modalities", "functions", "function_call")},
}
"""Fields of the Responses API that would change the answer."""


@dataclass
class _Found:
    """Fields taken out of a body, by path, in their order. neutral, refused: what is known of its fields."""

    neutral: Collection[str]
    refused: Mapping[str, Refusal]
    known: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)


def settle(body: object, form: type[Body]) -> tuple[str, ...]:
    """Take out of a body, in place, what changes nothing. The notices of it: which fields they were.

    Null counts as absent and makes no notice.

    Raises:
        RequestError: for a field that would change the answer, saying what to change.
    """
    response = form is ResponseBody
    found = _Found(RESPONSE_KNOWN, RESPONSE_REFUSED) if response else _Found(KNOWN, REFUSED)
    toolless = not isinstance(body, dict) or not body.get("tools")
    for path, given, model in _response_levels(body) if response else _levels(body, form):
        names = model.names()
        for name in list(given):
            if name not in names:
                _take(path, name, given.pop(name), found)
            elif _asks_nothing(path + name, given[name], found.neutral, toolless):  # it is validated all the same
                found.known[path + name] = None
    if response and isinstance(body, dict):
        inert = [name for name in _strings(body.get("include")) if name not in (RESULTS, LOGPROBS)]
        found.known.update((f"include {name[:NAME_CHARS]}", None) for name in inert)
    notices = (("no effect here", found.known), ("unknown and ignored", found.unknown))
    return tuple(_notice(what, list(fields)) for what, fields in notices if fields)


def _asks_nothing(path: str, value: object, neutral: Collection[str], toolless: bool) -> bool:
    if path in neutral:
        return value is not None
    return toolless and any(type(value) is type(x) and value == x for x in EMPTY.get(path, ()))


def _take(path: str, name: str, value: object, found: _Found) -> None:
    if value is None:
        return
    shown = path + name
    refusal = found.refused.get(shown)
    if refusal is not None and not any(type(value) is type(x) and value == x for x in refusal.unless):
        param = shown.replace("[]", "")
        raise RequestError(f"{param} cannot be had: {refusal.advice}", param=param, code="unsupported_parameter")
    fields = found.known if refusal is not None or shown in found.neutral else found.unknown
    fields[path + name[:NAME_CHARS]] = None


def _notice(what: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return readable(f"fields of the request, {what}: {', '.join(names[:NAMED])}{more}")


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
    if isinstance(choice := body.get("tool_choice"), dict):
        yield "tool_choice.", choice, ToolChoice
        if isinstance(named := choice.get("function"), dict):
            yield "tool_choice.function.", named, NamedFunction
    for tool in _objects(body.get("tools")):
        yield "tools[].", tool, ChatTool
        if isinstance(function := tool.get("function"), dict):
            yield "tools[].function.", function, FunctionTool
    for message in _objects(body.get("messages")):
        yield "messages[].", message, ChatMessage
        for call in _objects(message.get("tool_calls")):
            yield "messages[].tool_calls[].", call, CalledTool
            if isinstance(function := call.get("function"), dict):
                yield "messages[].tool_calls[].function.", function, CalledFunction
        for part in _objects(message.get("content")):
            yield "messages[].content[].", part, TextPart


def _response_levels(body: object) -> Iterator[tuple[str, dict[str, Any], type[Body]]]:
    """The same of the Responses API."""
    if not isinstance(body, dict):
        return
    yield "", body, ResponseBody
    if isinstance(text := body.get("text"), dict):
        yield "text.", text, TextConfig
        if isinstance(wanted := text.get("format"), dict):
            yield "text.format.", wanted, TextFormat
    if isinstance(choice := body.get("tool_choice"), dict):
        yield "tool_choice.", choice, ResponseChoice
    for tool in _objects(body.get("tools")):
        yield from _response_tool(tool)
    for item in _objects(body.get("input")):
        yield "input[].", item, ITEMS.get(str(item.get("type", "message")), InputMessage)
        for part in (*_objects(item.get("content")), *_objects(item.get("output"))):
            yield "input[].content[].", part, InputPart


def _response_tool(tool: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], type[Body]]]:
    if tool.get("type") != "file_search":
        yield "tools[].", tool, ResponseTool
        return
    yield "tools[].", tool, SearchTool
    if isinstance(ranking := tool.get("ranking_options"), dict):
        yield "tools[].ranking_options.", ranking, Ranking
    level = [filters] if isinstance(filters := tool.get("filters"), dict) else []
    for _ in range(DEPTH + 1):  # what lies deeper is refused
        for one in level:
            yield "tools[].filters.", one, Compound if one.get("type") in ("and", "or") else Comparison
        level = [part for one in level for part in _objects(one.get("filters"))]


def _strings(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
