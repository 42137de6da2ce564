"""Tools: how they are told to the model, and the grammar that its answer follows.

A template that knows tools lists them itself, and writes calls and their results: its models write a call in the same
way (`Tokenizer.call_form`). For any other template the system message lists them, and a call is the JSON object alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ragjax.core import CALL_ID, Message, Request, RequestError, Tool, Tools, invalid
from ragjax.models.chat_template import CONTEXT
from ragjax.models.tokenizer import Tokenizer

MOST_CALLS = 8
"""Calls of one answer, at most."""

LISTED = (
    "You may call one of these functions, one JSON object a line:\n{tools}\n"
    'To call one, answer with a JSON object alone: {{"name": FUNCTION, "arguments": ARGUMENTS}}'
)
"""What the system message says of tools where the template knows none."""


def told(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> tuple[Message, ...]:
    """The messages as the model's template takes them: calls as text, and tools listed if the template does not."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        if message.role == "tool" and message.tool_call_id not in names:
            called = f"calls a tool with the id {message.tool_call_id!r}, which a tool's message answers"
            raise invalid("messages", f"no message before {called}")
    if tools is not None:
        _check(tokenizer, json.dumps(for_template(tools), ensure_ascii=False), "tools", tokenizer.knows_tools)
    if tokenizer.shows_calls:
        for call in (call for message in messages for call in message.tool_calls):
            _check(tokenizer, call.name, "messages", True)
            if not _is_json(call.arguments):  # a template writes it as it is
                _check(tokenizer, call.arguments, "messages", True)
        return tuple(_one_by_one(messages) if tokenizer.call_form.between is None else messages)
    said = [_plain(tokenizer, message, names) for message in messages]
    if tokenizer.knows_tools:
        return tuple(said)
    if tools is not None:
        lines = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools.offered)
        system = [said.pop(0).content] if said[0].role == "system" else []
        said.insert(0, Message("system", "\n\n".join((*system, LISTED.format(tools=lines)))))
    return tuple(_joined(said) if names else said)


def for_template(tools: Tools | None) -> list[dict[str, object]] | None:
    if tools is None:
        return None
    return [{"type": "function", "function": _described(tool)} for tool in tools.offered]


def grammar(request: Request, tokenizer: Tokenizer) -> tuple[str, str, list[tuple[str, str, bool]]] | None:
    """The grammar that an answer follows; None if it may say anything.

    Returns:
        The grammar in Lark, in which `@0` stands for the first schema; the field that asks for it; and of each schema
        what it belongs to, its JSON text, and whether it is to be followed in all it says.
    """
    sampling, tools = request.sampling, request.tools
    answers: list[tuple[str, str, bool]] = []
    if sampling.json_schema is not None:
        answers = [("the schema of the answer", sampling.json_schema, sampling.strict)]
    if tools is None:
        return ("start: @0\n", "response_format", answers) if answers else None
    form, rules, names = tokenizer.call_form, "", []
    schemas: list[tuple[str, str, bool]] = []
    for number, tool in enumerate(tools.offered):
        if tools.named in (None, tool.name):
            names.append(f"call_{number}")
            rules += f"call_{number}: {_lark(tokenizer, tool.name + form.middle)} args_{number}\n"
            rules += f"args_{number}: @{len(schemas)}\n"
            schemas.append((f"the parameters of the tool {tool.name}", tool.parameters, tool.strict))
    several = tools.several and tools.named is None and form.between is not None
    more = f"({_lark(tokenizer, form.between or '')} call){{0,{MOST_CALLS - 1}}} " if several else ""
    rules += f"call: {' | '.join(names)}\ncalls: {_lark(tokenizer, form.head[len(form.mark) :])} call {more}"
    rules += f"{_lark(tokenizer, form.tail)}\n"
    mark = _lark(tokenizer, form.mark) if form.mark else ""
    if tools.required:
        thought = "thought? " if form.thinks else ""
        return f"start: {thought}{mark} calls\n{rules}{THOUGHT if thought else ''}", "tools", schemas
    if answers:
        return f"start: @{len(schemas)} | {mark} calls\n{rules}", "tools", schemas + answers
    if not form.mark:  # any text but one that is the beginning of a call: an answer is either
        return f"start: TEXT | calls\n{rules}TEXT: /(?s:\\s*([^{{\\s].*)?)/\n", "tools", schemas
    literal = re.escape(form.mark).replace("/", "\\/")
    rules += f"TEXT: /(?s:.*)/ & ~/(?s:.*{literal}.*)/\n"
    if mark.startswith("<["):
        return f"start: TEXT | TEXT {mark} calls\n{rules}", "tools", schemas
    return f"start: TEXT | said calls\n{rules}said[lazy]: /(?s:.*){literal}/\n", "tools", schemas


def shown(request: Request, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Control tokens that an answer shows: those with which it writes a call."""
    form = tokenizer.call_form
    spelled = f"{form.head}{form.middle}{form.between or ''}{form.tail}"
    runs = () if request.tools is None else tokenizer.controls(spelled)
    return tuple(run for run in runs if isinstance(run, int))


THOUGHT = "thought[lazy]: /(?s:<think>.*)<\\/think>\\n\\n/\n"


def _lark(tokenizer: Tokenizer, text: str) -> str:
    """A rule in Lark for a text that may name control tokens, and for a call's id."""
    found = []
    for run in tokenizer.controls(text):
        parts = [run] if isinstance(run, int) else re.split(f"({CALL_ID})", run)
        for part in filter(None, parts):
            is_id = part == CALL_ID
            found.append(f"<[{part}]>" if isinstance(part, int) else "/[a-zA-Z0-9]{9}/" if is_id else json.dumps(part))
    return " ".join(found) or '""'


def _described(tool: Tool) -> dict[str, object]:
    return {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}


def _plain(tokenizer: Tokenizer, message: Message, names: Mapping[str, str]) -> Message:
    if message.role == "tool" and tokenizer.knows_tools:
        return Message("tool", message.content)
    if message.role == "tool":
        return Message("user", f"{names[message.tool_call_id or '']} returned: {message.content}")
    said = (message.content, *map(tokenizer.call_form.spelled, message.tool_calls))
    return replace(message, content="\n".join(filter(None, said)), tool_calls=())


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with one call each, and its result behind it: some templates take no more."""
    split: set[str] = set()
    for i, message in enumerate(messages):
        if message.tool_call_id in split:
            continue
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = {m.tool_call_id: m for m in messages[i + 1 :] if m.role == "tool"}
        for number, call in enumerate(message.tool_calls):
            yield replace(message, content="" if number else message.content, tool_calls=(call,))
            if call.id in results:
                split.add(call.id)
                yield results[call.id]


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except (ValueError, RecursionError):
        return False
    return True


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user's side: many templates want turns to alternate."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = Message("user", f"{found[-1].content}\n{message.content}")
        else:
            found.append(message)
    return found


def _check(tokenizer: Tokenizer, text: str, param: str, shown: bool) -> None:
    """Refuse a text that spells a control token, if the template shows it where control tokens count."""
    if re.search(f"[{CONTEXT[0]}{CONTEXT[-1]}{CALL_ID[0]}]", text):
        raise RequestError(f"{param} contain reserved private-use characters", param=param)
    if shown and (name := tokenizer.names_control(text)):
        raise RequestError(f"{param} contain {name!r}, a control token of the model: spell it otherwise", param=param)
