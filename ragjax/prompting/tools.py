"""Tools: how they are told to the model, and the grammar that its answer follows.

A template that knows tools lists them itself; its models write a call as Hermes models do, between `<tool_call>` and
`</tool_call>`. For any other template the system message lists them, and a call is the JSON object alone. The call is
always spelled in one way, so that a reader can cut it without parsing: {"name": "NAME", "arguments": {…}}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from ragjax.core import Message, Request, RequestError, Tool, Tools
from ragjax.models.chat_template import CONTEXT
from ragjax.models.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
"""What stands around a call where the template knows tools."""

LISTED = (
    "You may call one of these functions, one JSON object a line:\n{tools}\n"
    'To call one, answer with a JSON object alone: {{"name": FUNCTION, "arguments": ARGUMENTS}}'
)
"""What the system message says of tools where the template knows none."""

SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spelled: white space without end would be an answer without end."""


def told(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools | None) -> tuple[Message, ...]:
    """The messages as the model's template takes them: calls as text, and tools listed if the template does not.

    Raises:
        RequestError: for the answer of a tool that was not called, or a text that would be a control token.
    """
    native = tokenizer.knows_tools
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    said = [_plain(message, names, native) for message in messages]
    if tools is not None:
        _check(tokenizer, tools)
        if not native:
            said = _listed(said, tools)
    answers = not native and any(message.role == "tool" for message in messages)
    return tuple(_joined(said) if answers else said)


def for_template(tools: Tools | None) -> list[dict[str, object]] | None:
    """The tools in OpenAI's form, as templates take them."""
    if tools is None:
        return None
    return [{"type": "function", "function": _described(tool)} for tool in tools.offered]


def grammar(request: Request, native: bool) -> tuple[str, str] | None:
    """The grammar that an answer follows, in Lark, and the field that asks for it; None if it may say anything.

    native: whether the model's template knows tools.
    """
    schema, tools = request.sampling.json_schema, request.tools
    if tools is None:
        return None if schema is None else (f"start: {_json(schema)}\n", "response_format")
    rules, calls = "", []
    for number, tool in enumerate(tools.offered):
        if tools.named in (None, tool.name):
            calls.append(f"call_{number}")
            head = json.dumps((OPEN if native else "") + f'{{"name": "{tool.name}", "arguments": ')
            tail = json.dumps("}" + (CLOSE if native else ""))
            rules += f"call_{number}: {head} args_{number} {tail}\nargs_{number}: {_json(tool.parameters)}\n"
    if not tools.required:
        calls.append("said")
        rules += f"said: {'TEXT' if schema is None else _json(schema)}\n"
        if schema is None:
            # any text but one that is the beginning of a call: an answer is either
            text = f"/(?s:.*)/ & ~/(?s:.*{OPEN.strip()}.*)/" if native else r"/(?s:\s*([^{\s].*)?)/"
            rules += f"TEXT: {text}\n"
    return f"start: {' | '.join(calls)}\n{rules}", "tools"


def _json(schema: str) -> str:
    return f"%json {json.dumps({**json.loads(schema), 'x-guidance': SPELLING})}"


def _described(tool: Tool) -> dict[str, object]:
    return {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}


def _plain(message: Message, names: dict[str, str], native: bool) -> Message:
    """A message whose content says all of it."""
    if message.role == "tool":
        name = names.get(message.tool_call_id or "")
        if name is None:
            reason = (
                f"no message before calls a tool with the id {message.tool_call_id!r}, which a tool's message answers"
            )
            raise RequestError(reason, param="messages", code="invalid_value")
        return Message("tool", message.content) if native else Message("user", f"{name} returned: {message.content}")
    calls = (f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in message.tool_calls)
    said = (message.content, *(f"{OPEN}{call}{CLOSE}" if native else call for call in calls))
    return replace(message, content="\n".join(filter(None, said)), tool_calls=())


def _listed(messages: Sequence[Message], tools: Tools) -> list[Message]:
    lines = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools.offered)
    listed = LISTED.format(tools=lines)
    if messages[0].role == "system":
        return [Message("system", f"{messages[0].content}\n\n{listed}"), *messages[1:]]
    return [Message("system", listed), *messages]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user's side: many templates want turns to alternate."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = Message("user", f"{found[-1].content}\n{message.content}")
        else:
            found.append(message)
    return found


def _check(tokenizer: Tokenizer, tools: Tools) -> None:
    """Refuse tools that spell a control token: the template shows them where control tokens count."""
    text = json.dumps(for_template(tools), ensure_ascii=False)
    if re.search(f"[{CONTEXT[0]}{CONTEXT[-1]}]", text):
        raise RequestError("tools contain reserved private-use characters", param="tools")
    if tokenizer.knows_tools and (name := tokenizer.names_control(text)):
        raise RequestError(f"tools contain {name!r}, a control token of the model: spell it otherwise", param="tools")
