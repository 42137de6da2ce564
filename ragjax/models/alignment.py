"""Which parts of a rendered chat are the template's, and which are the messages'.

A chat is rendered with sentinels in place of all contents: the frame shows the template's own text. It is rendered
twice more, with sentinels for every other content. There each content stands between two sentinels, so that what the
template took over of it is known, even if it imitates the template. Time is linear in the length of the renderings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragjax.core import RequestError

Pieces = list[tuple[str, bool]]
"""Runs of text in order, each with whether special tokens in it count (template) or are plain text (content)."""

_SENTINEL = re.compile("\U000f8ff2([0-9]+)\U000f8ff3")


def sentinel(index: int) -> str:
    """What stands in a rendering for the content of a message."""
    return f"\U000f8ff2{index}\U000f8ff3"


@dataclass(frozen=True)
class Frame:
    """The template's own text.

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
        """What stands for each message of this parity in a rendered half."""
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
