"""Which parts of a rendered chat are the template's, and which are the messages'.

A chat is rendered twice: with the messages' content, and with sentinels in its place. The second rendering, the frame,
shows the template's text around each content; `align` finds that text in the first. Time is linear in the length of the
rendering, but for a logarithm where a template changed the content.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from ragjax.core import RequestError

Pieces = list[tuple[str, bool]]
"""Runs of text in order, each with whether special tokens in it count (template) or are plain text (content)."""

_SENTINEL = re.compile("\U000f8ff2([0-9]+)\U000f8ff3")


def sentinel(index: int) -> str:
    """What stands in the frame for the content of a message."""
    return f"\U000f8ff2{index}\U000f8ff3"


def align(whole: str, frame: str, content: Sequence[str]) -> Pieces:
    """Cut `whole` into the template text that `frame` has around its sentinels, and what stands between.

    What stands between must be a part of the message's own content: templates may trim it, or leave out an
    earlier answer's reasoning. The longest fit is taken, so content that imitates the template stays content.

    content: of each message, in the order of the sentinels' numbers.

    Raises:
        RequestError: if a message's content is repeated, dropped or rewritten.
    """
    first, *rest = _SENTINEL.split(frame)  # text, number, text, number, …, text
    order = list(map(int, rest[::2]))
    count = Counter(order)
    for index in (*range(len(content)), *order):
        if count[index] != 1 or index >= len(content):
            raise _misfit(index)
    pieces: Pieces = [(first, True)]
    at = len(first)
    for index, after in zip(order, rest[1::2], strict=True):
        end = _content_end(whole, at, content[index], after, last=index == order[-1])
        if end < at:
            raise _misfit(index)
        pieces += [(whole[at:end], False), (after, True)]
        at = end + len(after)
    if "".join(text for text, _ in pieces) != whole:
        raise _misfit(order[-1] if order else 0)
    return pieces


def _content_end(whole: str, at: int, content: str, after: str, *, last: bool) -> int:
    """Where the content that begins at `at` ends: the last place before `after`; -1 if there is none."""
    if last:
        end = len(whole) - len(after)
        return end if whole[at:end] in content else -1
    return whole.rfind(after, at, at + _longest(whole, at, content) + len(after))


def _longest(whole: str, at: int, content: str) -> int:
    """Length of the longest part of `content` that stands in `whole` at `at`."""
    if whole.startswith(content, at):
        return len(content)
    most = min(len(content), len(whole) - at)
    # a prefix of a part is a part, too, so the lengths that fit are all below one that does not
    return bisect_left(range(1, most + 1), True, key=lambda length: whole[at : at + length] not in content)


def _misfit(index: int) -> RequestError:
    return RequestError(
        f"the model's chat template does not take over the content of message {index} as it is; "
        "content and template cannot be told apart",
        param="messages",
    )
