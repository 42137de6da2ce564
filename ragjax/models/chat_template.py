"""A model's chat template: from messages to text, cut into what the template says and what the messages say."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ragjax.core import CALL_ID, CallForm, ConfigError, Message, RequestError, ToolCall

CONTEXT = "\U000f8ff0context\U000f8ff1"
"""Stands in a message's content for the retrieved chunks; `ChatTemplate.pieces` cuts there. Text that users send must
not contain it."""


class ChatTemplate:
    """A template in Jinja2, as checkpoints bring it, in a sandbox.

    A system message for which the template has no place stands before the text of the first user message instead.
    """

    def __init__(self, source: str, special: Mapping[str, str], control: Collection[str] = ()):
        """special: texts of special tokens by role. control: texts that no JSON that the template writes may hold."""
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")
        self._template = _compile(source, self._json)
        self._special = special
        self._thinks = "</think>" in source

    def render(self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, object]) -> str:
        messages, _ = self._seated(messages, variables)
        return self._render(messages, [message.content for message in messages], generation_prompt, variables)

    def pieces(self, messages: Sequence[Message], generation_prompt: bool, variables: Mapping[str, object]) -> Pieces:
        """The text of a chat in pieces: template (True) and message content (False).

        Content is cut at CONTEXT, and each CONTEXT is a piece of its own, as is a system message that stands before the
        user's text. RequestError: the template repeats, drops or rewrites the content of a message.
        """
        messages, head = self._seated(messages, variables)
        content = [message.content for message in messages]
        whole = self._render(messages, content, generation_prompt, variables)
        spared = {i for i, message in enumerate(messages) if message.tool_calls or _is_bare(message)}
        frame = Frame.of(self._render(messages, hidden(messages), generation_prompt, variables), len(messages), spared)
        even, odd = (self._render(messages, frame.half(content, i), generation_prompt, variables) for i in (0, 1))
        pieces: Pieces = []
        escaped = [self._json(text)[1:-1] for text in content]
        for text, is_template in frame.align(whole, (even, odd), content, escaped):
            if is_template:
                pieces.append((text, True))
                continue
            if head and text.startswith(head):
                pieces.append((head, False))
                text, head = text[len(head) :], ""
            pieces += [(run, False) for run in re.split(f"({CONTEXT})", text)]
        return [piece for piece in pieces if piece[0]]

    @cached_property
    def knows_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": sentinel(9), "description": "", "parameters": {}}}
        return self._shows(9, (Message("user", "?"),), {"tools": [tool]})

    @cached_property
    def call_form(self) -> CallForm | None:
        """The form of calls in the template; None if it writes none, or not as a name before an object of JSON."""
        name, given = sentinel(7), {sentinel(8): f'{sentinel(9)}"'}
        call, shown = ToolCall(CALL_ID, name, self._json(given)), self._json(given)

        def chat(calls: int, *behind: Message) -> tuple[Message, ...]:
            return Message("user", "?"), Message("assistant", "" if calls else name, (call,) * calls), *behind

        def said(messages: Sequence[Message]) -> str:
            return self._render(messages, [message.content for message in messages], False, {})

        try:
            asked = self._render(chat(0)[:1], ["?"], True, {})
            called, last, plain = said(chat(1, Message("tool", "?", (), CALL_ID))), said(chat(1)), said(chat(0))
        except RequestError:
            return None
        head, named, rest = called.removeprefix(asked).partition(name)
        middle, argued, _ = rest.partition(shown)
        if not called.startswith(asked) or not named or not argued:
            return None
        tail = last.rpartition(shown)[2].removesuffix(plain.rpartition(name)[2])  # without what ends a turn
        try:
            between = said(chat(2)).split(shown)[1].partition(name)[0]
        except RequestError:  # it takes one call
            between = None
        mark = re.match(r"(.*?)\s*(\[?\{|$)", head.lstrip(), re.DOTALL)
        return CallForm(head.lstrip(), middle, tail, between, mark[1] if mark else "", self._thinks)

    @cached_property
    def _without_tools(self) -> Mapping[str, object]:
        """A value that tells the template that there are no tools; some ask only if the variable is there."""
        try:
            self._template.render({**self._special, "tools": None, "messages": [{"role": "user", "content": "?"}]})
        except _REFUSALS:
            return {}
        return {"tools": None}

    def _shows(self, index: int, messages: Sequence[Message], variables: Mapping[str, object]) -> bool:
        try:
            return sentinel(index) in self._render(messages, hidden(messages), True, variables)
        except RequestError:
            return False

    def _seated(self, messages: Sequence[Message], variables: Mapping[str, object]) -> tuple[Sequence[Message], str]:
        """The messages as the template takes them, and the text put before the first user message, if any.

        Some templates refuse a system message, and some drop it, a few only behind the answer of a tool.
        """
        first = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        if not messages or messages[0].role != "system":
            return messages, ""
        probed = (replace(messages[0], content=messages[0].content or "?"), *messages[1:])
        if self._shows(0, probed, variables):
            return messages, ""
        if first is None:
            return (replace(messages[0], role="user"), *messages[1:]), ""
        system = messages[0].content.strip()
        head = f"{system}\n\n" if system else ""
        asked = Message("user", head + messages[first].content)
        return (*messages[1:first], asked, *messages[first + 1 :]), head

    def _render(
        self, messages: Sequence[Message], content: Sequence[str], prompt: bool, variables: Mapping[str, object]
    ) -> str:
        given = [_as_given(message, text) for message, text in zip(messages, content, strict=True)]
        defaults: dict[str, object] = {"documents": None, **self._special}
        known = {name: value for name, value in variables.items() if name != "tools" or value is not None}
        if "tools" not in known:
            defaults |= self._without_tools
        try:
            return self._template.render({**defaults, **known, "messages": given, "add_generation_prompt": prompt})
        except _REFUSALS as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error

    def _json(self, value: object, **options: Any) -> str:
        """The value as JSON; what would be a control token is spelled otherwise, and reads the same."""
        text = json.dumps(value, **{"ensure_ascii": False, **options})
        return self._control.sub(lambda found: f"\\u{ord(found[0][0]):04x}{found[0][1:]}", text)


_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError)
"""What a template raises that cannot take what it is given."""


def _as_given(message: Message, content: str) -> dict[str, object]:
    """A message as templates take it, in OpenAI's form with arguments that are parsed."""
    found: dict[str, object] = {"role": message.role, "content": content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": _short(call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = _short(message.tool_call_id)
    return found


def _parsed(arguments: str) -> object:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # of a call that was cut
        return arguments


def _short(call: str) -> str:
    """The id of a call in nine letters and digits, which Mistral's templates insist on."""
    fits = call == CALL_ID or re.fullmatch("[a-zA-Z0-9]{9}", call)
    return call if fits else hashlib.sha256(call.encode()).hexdigest()[:9]


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str, tojson: Callable[..., str]) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
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
    return f"\U000f8ff2{index}\U000f8ff3"


def hidden(messages: Sequence[Message]) -> list[str]:
    return ["" if _is_bare(message) else sentinel(index) for index, message in enumerate(messages)]


def _is_bare(message: Message) -> bool:
    """True for a message that may be without content, which a template may ask for."""
    return not message.content and message.role != "user"


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
    def of(cls, rendered: str, count: int, spared: Collection[int] = ()) -> Frame:
        """The frame of a chat of `count` messages, rendered with sentinels alone. spared: those that may be dropped."""
        parts = _SENTINEL.split(rendered)  # text, number, text, number, …, text
        order = tuple(map(int, parts[1::2]))
        times = Counter(order)
        for index in (*range(count), *order):
            if index >= count or times[index] > 1 or not (times[index] or index in spared):
                raise _misfit(index)
        return cls(order, tuple(parts[::2]))

    def half(self, content: Sequence[str], parity: int) -> list[str]:
        """The contents with sentinels for every other one: those at places of this parity stay."""
        hid = set(self.order[1 - parity :: 2])
        return [sentinel(index) if index in hid else text for index, text in enumerate(content)]

    def align(
        self, whole: str, halves: tuple[str, str], content: Sequence[str], escaped: Sequence[str] | None = None
    ) -> Pieces:
        """Cut `whole` into the template's text and what it took over of each message.

        That must be a part of the message's content but for white space: templates may trim it, or leave out an earlier
        answer's reasoning. halves: what `half` gives for parity 0 and 1, rendered. escaped: contents as they stand in
        JSON, which a template may write instead. RequestError: the content of a message is rewritten.
        """
        for index, text in enumerate(content):
            if "\U000f8ff2" in text:
                raise RequestError(f"message {index} contains reserved private-use characters", param="messages")
        taken = dict(self._taken(halves[0], 0)) | dict(self._taken(halves[1], 1))
        pieces: Pieces = [(self.runs[0], True)]
        for index, after in zip(self.order, self.runs[1:], strict=True):
            if not any(_within(taken[index], one[index]) for one in (content, escaped or content)):
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
        return self.order[max(0, (place - 1) // 2)] if self.order else 0


def _within(part: str, text: str) -> bool:
    return part in text or "".join(part.split()) in "".join(text.split())


def _misfit(index: int) -> RequestError:
    return RequestError(
        f"the model's chat template does not take over the content of message {index} as it is; "
        "content and template cannot be told apart",
        param="messages",
    )
