"""A model's chat template: from messages to text, cut into what the template says and what the messages say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragjax.core import ConfigError, Message, RequestError

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
        """The text of a chat; `variables` are passed to the template. Raises RequestError if it refuses them."""
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
        """True if the template shows system messages; some refuse them, some drop them."""
        return self._shows(0, (Message("system", ""), Message("user", "")), {})

    @cached_property
    def knows_tools(self) -> bool:
        """True if the template lists the tools that it is given."""
        tool = {"type": "function", "function": {"name": sentinel(9), "description": "", "parameters": {}}}
        return self._shows(9, (Message("user", ""),), {"tools": [tool]})

    def _shows(self, index: int, messages: Sequence[Message], variables: Mapping[str, object]) -> bool:
        try:
            return sentinel(index) in self._render(messages, [*map(sentinel, range(len(messages)))], True, variables)
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
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be parsed: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


Pieces = list[tuple[str, bool]]
"""Runs of text in order, each with whether special tokens in it count (template) or are plain text (content)."""

_SENTINEL = re.compile("\U000f8ff2([0-9]+)\U000f8ff3")


def sentinel(index: int) -> str:
    """The placeholder for the content of message `index` in a rendering."""
    return f"\U000f8ff2{index}\U000f8ff3"


@dataclass(frozen=True)
class Frame:
    """The template's own text, told apart from the messages'.

    A chat is rendered with sentinels in place of all contents: the frame is the template's own text. It is rendered
    twice more, with sentinels for every other content. There each content stands between two sentinels, so the text
    that the template copied from it is known, even if it imitates the template. Time is linear in the renderings.

    order: messages in the order in which the template shows them. runs: its text before, between and behind them, one
    more than messages.
    """

    order: tuple[int, ...]
    runs: tuple[str, ...]

    @classmethod
    def of(cls, rendered: str, count: int) -> Frame:
        """The frame of a chat of `count` messages that was rendered with sentinels alone.

        Raises:
            RequestError: if a message is repeated or dropped.
        """
        parts = _SENTINEL.split(rendered)  # text, number, text, number, …, text
        order = tuple(map(int, parts[1::2]))
        times = Counter(order)
        for index in (*range(count), *order):
            if times[index] != 1 or index >= count:
                raise _misfit(index)
        return cls(order, tuple(parts[::2]))

    def half(self, content: Sequence[str], parity: int) -> list[str]:
        """The contents with sentinels for every other one: those at places of this parity stay."""
        shown = set(self.order[parity::2])
        return [text if index in shown else sentinel(index) for index, text in enumerate(content)]

    def align(self, whole: str, halves: tuple[str, str], content: Sequence[str]) -> Pieces:
        """Cut `whole` into the template's text and what it took over of each message.

        That must be a part of the message's content: templates may trim it, or leave out an earlier answer's reasoning.

        halves: what `half` gives for parity 0 and 1, rendered.

        Raises:
            RequestError: if the content of a message is rewritten, or the template's own text depends on it; or if a
                message contains the characters of a sentinel.
        """
        for index, text in enumerate(content):
            if "\U000f8ff2" in text:
                raise RequestError(f"message {index} contains reserved private-use characters", param="messages")
        taken = dict(self._taken(halves[0], 0)) | dict(self._taken(halves[1], 1))
        pieces: Pieces = [(self.runs[0], True)]
        for index, after in zip(self.order, self.runs[1:], strict=True):
            if taken[index] not in content[index]:
                raise _misfit(index)
            pieces += [(taken[index], False), (after, True)]
        at = 0
        for place, (text, _) in enumerate(pieces):
            if not whole.startswith(text, at):
                raise _misfit(self._near(place))
            at += len(text)
        if at != len(whole):
            raise _misfit(self._near(len(pieces)))
        return pieces

    def _taken(self, half: str, parity: int) -> Iterator[tuple[int, str]]:
        """Yield the text that a rendered half shows for each message of this parity."""
        at = len(self.runs[0])
        for place, index in enumerate(self.order):
            after = self.runs[place + 1]
            if place % 2 != parity:
                hidden = sentinel(index) + after
                if not half.startswith(hidden, at):
                    raise _misfit(index)
                at += len(hidden)
                continue
            last = place + 1 == len(self.order)
            end = len(half) - len(after) if last else half.find(after + sentinel(self.order[place + 1]), at)
            if end < at:
                raise _misfit(index)
            yield index, half[at:end]
            at = end + len(after)

    def _near(self, place: int) -> int:
        """The message of a piece, or the one before it."""
        return self.order[max(0, (place - 1) // 2)] if self.order else 0


def _misfit(index: int) -> RequestError:
    return RequestError(
        f"the model's chat template does not take over the content of message {index} as it is; "
        "content and template cannot be told apart",
        param="messages",
    )
