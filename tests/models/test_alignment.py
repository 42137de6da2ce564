"""The alignment of a rendered chat with its template: by its definition, at a cost that is linear in the chat."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import Message, RequestError
from ragjax.models.alignment import align, sentinel
from ragjax.models.chat_template import ChatTemplate
from tests.support.growth import Scanned, assert_linear, calls
from tests.support.vocabulary import CHATML, GOLDENS, LLAMA2


def slow_align(whole: str, frame: str, sentinels: Sequence[str], content: Sequence[str]) -> list[tuple[str, bool]]:
    """The definition: what `align` was before it became linear."""
    order = sorted(range(len(sentinels)), key=lambda index: frame.find(sentinels[index]))
    for index, mark in enumerate(sentinels):
        if frame.count(mark) != 1:
            raise misfit(index)
    pieces: list[tuple[str, bool]] = []
    rest, at = frame, 0
    for index in order:
        before, _, rest = rest.partition(sentinels[index])
        pieces.append((before, True))
        at += len(before)
        after = rest[: min((rest.find(s) for s in sentinels if s in rest), default=len(rest))]
        end = slow_end(whole, at, content[index], after, last=index == order[-1])
        if end is None:
            raise misfit(index)
        pieces.append((whole[at:end], False))
        at = end
    pieces.append((rest, True))
    if "".join(text for text, _ in pieces) != whole:
        raise misfit(order[-1] if order else 0)
    return pieces


def slow_end(whole: str, at: int, content: str, after: str, *, last: bool) -> int | None:
    if last:
        end = len(whole) - len(after)
        return end if end >= at and whole[at:end] in content else None
    for end in range(min(at + len(content), len(whole)), at - 1, -1):
        if whole.startswith(after, end) and whole[at:end] in content:
            return end
    return None


def misfit(index: int) -> RequestError:
    return RequestError(f"content of message {index} as it is")


def outcome(function, *arguments: object) -> object:  # type: ignore[no-untyped-def]
    """The pieces, or the message that does not fit."""
    try:
        return function(*arguments)
    except RequestError as error:
        found = re.search(r"content of message (\d+) as it is", str(error))
        assert found is not None
        return int(found[1])


def assert_by_definition(whole: str, frame: str, content: Sequence[str]) -> object:
    expected = outcome(slow_align, whole, frame, list(map(sentinel, range(len(content)))), content)
    assert outcome(align, whole, frame, content) == expected
    return expected


TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "repeats": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "drops all but the first": "{{ messages[0].content }}",
    "drops systems": "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "alters": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "merges": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "merges by lines": "{{ messages | map(attribute='content') | join('\n') }}",
    "reverses": "{% for m in messages | reverse %}[{{ m.content }}]{% endfor %}",
    "cuts": "{% for m in messages %}<{{ m.content[:9] }}>{% endfor %}",
    "leaves out thoughts": "{% for m in messages %}{{ m.content.split('</a>')[-1] | trim }}<|im_end|>\n{% endfor %}",
    "counts": "{% for m in messages %}{{ loop.index }}{{ m.content }}{{ m.content | length }}{% endfor %}",
}
WORDS = st.sampled_from(
    ["a", "b", "aa", " ", "\n", "</a>", "<|im_end|>\n", "[INST] ", " [/INST]", "user: ", "1", "][", ""]
)
TEXT = st.lists(WORDS | st.text(max_size=3), max_size=6).map("".join)
MESSAGES = st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=6)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES)
def test_random_chats_through_templates_align_by_definition(name: str, messages: list[Message]) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    content = [message.content for message in messages]
    whole = template._render(messages, content, True, {})
    frame = template._render(messages, list(map(sentinel, range(len(messages)))), True, {})
    pieces = assert_by_definition(whole, frame, content)
    if name in ("chatml", "llama2") and not isinstance(pieces, int):
        assert "".join(text for text, _ in pieces) == whole  # type: ignore[attr-defined]


@pytest.mark.parametrize("template", [CHATML, LLAMA2])
def test_goldens_align_by_definition(template: str) -> None:
    made = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    texts = GOLDENS["texts"]
    messages = [Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]
    frame = made._render(messages, list(map(sentinel, range(len(texts)))), True, {})
    pieces = assert_by_definition(made._render(messages, texts, True, {}), frame, texts)
    assert not isinstance(pieces, int)


FEW = st.text("ab", max_size=5)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_frame_and_text_align_by_definition(data: st.DataObject) -> None:
    """Few letters, so that content and template can be taken for each other everywhere."""
    content = data.draw(st.lists(FEW, max_size=4))
    order = data.draw(st.permutations(range(len(content))) | st.lists(st.sampled_from(range(len(content) or 1))))
    order = [index for index in order if index < len(content)]
    runs = [data.draw(st.text("ab", max_size=2)) for _ in range(len(order) + 1)]
    frame = runs[0] + "".join(sentinel(i) + run for i, run in zip(order, runs[1:], strict=True))
    said = [data.draw(st.just(content[i]) | FEW | st.just(content[i].strip("a"))) for i in order]
    whole = runs[0] + "".join(text + run for text, run in zip(said, runs[1:], strict=True))
    assert_by_definition(data.draw(st.just(whole) | st.text("ab", max_size=12)), frame, content)


HARD = {
    "as they are": ("some words", lambda text: text),
    "trimmed": ("  some words\n", str.strip),
    "like the template": ("<|im_end|>\n" * 4, lambda text: text),
    "thoughts left out": ("<a>hm</a> yes", lambda text: text.split("</a>")[-1].strip()),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("longer", ["messages", "content"])
def test_alignment_is_linear(case: str, longer: str) -> None:
    """In the number of messages, and in the length of each."""
    text, taken = HARD[case]

    def cost(size: int) -> int:
        count, repeated = (size, 1) if longer == "messages" else (5, size)
        content = [text * repeated] * count
        whole = Scanned("".join(f"<|im_start|>user\n{taken(one)}<|im_end|>\n" for one in content))
        frame = "".join(f"<|im_start|>user\n{sentinel(i)}<|im_end|>\n" for i in range(count))
        return calls(lambda: align(whole, frame, content)) + whole.scanned

    assert_linear(cost, 100, slack=1.5)  # the binary search adds a logarithm


def test_a_sentinel_of_no_message_is_refused() -> None:
    with pytest.raises(RequestError, match="content of message 7"):
        align("a", f"a{sentinel(7)}", [])
