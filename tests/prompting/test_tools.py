"""Tools as the model is told of them: by its template if it knows tools, else by the system message."""

from __future__ import annotations

import pytest

from ragjax.core import Message, RequestError, Tool, ToolCall, Tools
from ragjax.models.chat_template import CONTEXT
from ragjax.models.tokenizer import Tokenizer
from ragjax.prompting.chat import chat_prompt
from tests.support import tiny

PLAIN = tiny.byte_tokenizer()
NATIVE = Tokenizer(
    PLAIN._definition,
    special={"eos_token": 257},
    eos_ids=(257,),
    add_bos=False,
    chat_template="{% if tools %}<|start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    + tiny.TEMPLATE,
)
TOOL = Tool("weather", "Of a city.", '{"type": "object", "properties": {}}')
TOOLS = Tools((TOOL,))
LISTED = '{"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}'
CALL = '{"name": "weather", "arguments": {"city": "Ghent"}}'
CHAT = (
    Message("user", "How is it?"),
    Message("assistant", "", (ToolCall("c1", "weather", '{"city": "Ghent"}'), ToolCall("c2", "weather", "{}"))),
    Message("tool", "rain", (), "c1"),
    Message("tool", "sun", (), "c2"),
)


def text_of(tokenizer: Tokenizer, messages: tuple[Message, ...], tools: Tools | None, hits: tuple[()] | None) -> str:
    prompt = chat_prompt(tokenizer, messages, hits, tools=tools)
    return b"".join(tokenizer.token_bytes(int(token)) for token in prompt.tokens).decode()


def test_a_template_that_knows_tools_lists_them() -> None:
    assert NATIVE.knows_tools and not PLAIN.knows_tools
    for hits in ((), None):
        text = text_of(NATIVE, CHAT[:1], TOOLS, hits)
        assert text.count("weather") == 1 and text.startswith('<|start|>tools\n{"type": "function", "function": ')
        assert "<|start|>tools" not in text_of(NATIVE, CHAT[:1], None, hits)


def test_another_template_has_them_in_the_system_message() -> None:
    for hits in ((), None):
        own = text_of(PLAIN, (Message("system", "Be brief."), *CHAT[:1]), TOOLS, hits)
        assert own.startswith("<|start|>system\nBe brief.\n\nYou may call") and f"\n{LISTED}\n" in own
        assert f"\n{LISTED}\n" in text_of(PLAIN, CHAT[:1], TOOLS, hits)
    assert "weather" not in text_of(PLAIN, CHAT[:1], None, ())


def test_calls_and_their_answers_are_told() -> None:
    text = text_of(PLAIN, CHAT, TOOLS, None)
    said = f'<|start|>assistant\n{CALL}\n{{"name": "weather", "arguments": {{}}}}<|end|>\n'
    back = "<|start|>user\nweather returned: rain\nweather returned: sun<|end|>\n<|start|>assistant\n"
    assert text.endswith(said + back)
    native = text_of(NATIVE, CHAT, TOOLS, None)
    assert f"<|start|>assistant\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>" in native
    assert native.endswith("<|start|>tool\nrain<|end|>\n<|start|>tool\nsun<|end|>\n<|start|>assistant\n")


def test_the_question_is_the_users_last_message_though_tools_answer_behind_it() -> None:
    prompt = chat_prompt(PLAIN, CHAT, (), tools=TOOLS)
    question = PLAIN.decode(prompt.segments[-1].tokens)
    assert question.startswith("Question: How is it?") and "weather returned: rain" in question


def test_the_system_segment_with_tools_is_for_its_tenant_alone() -> None:
    assert chat_prompt(PLAIN, CHAT[:1], (), public=True).segments[0].public
    assert not chat_prompt(PLAIN, CHAT[:1], (), public=True, tools=TOOLS).segments[0].public


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(RequestError, match="calls a tool with the id 'c9'"):
        chat_prompt(PLAIN, (*CHAT[:2], Message("tool", "rain", (), "c9")), ())
    hostile = Tools((Tool("f", "<|end|>", "{}"),))
    with pytest.raises(RequestError, match="a control token"):
        chat_prompt(NATIVE, CHAT[:1], (), tools=hostile)
    tokens = chat_prompt(PLAIN, CHAT[:1], None, tools=hostile).tokens
    assert list(tokens).count(257) == 2, "where no template lists them, they are plain text"
    with pytest.raises(RequestError, match="private-use"):
        chat_prompt(PLAIN, CHAT[:1], (), tools=Tools((Tool("f", CONTEXT, "{}"),)))
    for messages in (CHAT[1:], CHAT[:2]):
        with pytest.raises(RequestError):
            chat_prompt(PLAIN, messages, ())
