"""A model's chat template: from messages to text, cut into what the template says and what the messages say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragjax.core import ConfigError, Message, RequestError
from ragjax.models.alignment import Frame, Pieces, sentinel

CONTEXT = "\U000f8ff0context\U000f8ff1"
"""Stands in a message's content for the retrieved chunks; `ChatTemplate.pieces` cuts there. Text that users send must
not contain it."""


class ChatTemplate:
    """A template in Jinja2, as checkpoints bring it, in a sandbox.

    A system message for which the template has no place stands before the text of the first user message instead.
    """

    def __init__(self, source: str, special: Mapping[str, str]):
        """special: texts of special tokens by role, such as `bos_token`. Raises ConfigError if it cannot be parsed."""
        self._template = _compile(source)
        self._special = special

    def render(self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, object]) -> str:
        """The text of a chat; `variables` are passed to the template.

        Raises:
            RequestError: if the template refuses the messages.
        """
        messages, _ = self._seated(messages)
        return self._render(messages, [message.content for message in messages], generation_prompt, variables)

    def pieces(self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, object]) -> Pieces:
        """The text of a chat in pieces: template (True) and message content (False).

        Content is cut at CONTEXT, and each CONTEXT is a piece of its own, as is a system message that stands before the
        user's text.

        Raises:
            RequestError: as `render`, and if the template repeats, drops or rewrites the content of a message, so that
                the two cannot be told apart.
        """
        messages, head = self._seated(messages)
        content = [message.content for message in messages]
        whole = self._render(messages, content, generation_prompt, variables)
        hidden = list(map(sentinel, range(len(messages))))
        frame = Frame.of(self._render(messages, hidden, generation_prompt, variables), len(messages))
        even, odd = (self._render(messages, frame.half(content, i), generation_prompt, variables) for i in (0, 1))
        pieces: Pieces = []
        for text, is_template in frame.align(whole, (even, odd), content):
            if is_template:
                pieces.append((text, True))
                continue
            if head and text.startswith(head):
                pieces.append((head, False))
                text, head = text[len(head) :], ""
            pieces += [(run, False) for run in re.split(f"({CONTEXT})", text)]
        return [piece for piece in pieces if piece[0]]

    @cached_property
    def _seats_system(self) -> bool:
        """Whether the template has a place for a system message; some refuse it, some drop it."""
        probe = (Message("system", ""), Message("user", ""))
        try:
            return sentinel(0) in self._render(probe, (sentinel(0), sentinel(1)), True, {})
        except RequestError:
            return False

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template lists the tools that it is given."""
        tool = {"type": "function", "function": {"name": sentinel(1), "description": "", "parameters": {}}}
        try:
            return sentinel(1) in self._render((Message("user", ""),), ("",), True, {"tools": [tool]})
        except RequestError:
            return False

    def _seated(self, messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
        """The messages as the template takes them, and the text put before the first user message, if any."""
        first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        if first is None or messages[0].role != "system" or self._seats_system:
            return messages, ""
        system = messages[0].content.strip()
        head = f"{system}\n\n" if system else ""
        asked = Message("user", head + messages[first].content)
        return (*messages[1:first], asked, *messages[first + 1 :]), head

    def _render(
        self, messages: Sequence[Message], content: Sequence[str], prompt: bool, variables: Mapping[str, object]
    ) -> str:
        given = [{"role": m.role, "content": text} for m, text in zip(messages, content, strict=True)]
        defaults: dict[str, object] = {"tools": None, "documents": None, **self._special}
        try:
            return self._template.render({**defaults, **variables, "messages": given, "add_generation_prompt": prompt})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be parsed: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
