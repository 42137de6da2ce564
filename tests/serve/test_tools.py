"""JSON answers and calls of tools, as OpenAI's client asks for them and reads them."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from ragjax import core
from ragjax.models.tokenizer import HERMES
from ragjax.serve.tool_calls import CallReader
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, MESSAGES, TEXT, Caught, Served, serving

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}
SAID = '{"name": "weather", "arguments": {"city": "\\"{Ghent}\\\\", "x": [{}]}}'
ARGUMENTS = SAID[len('{"name": "weather", "arguments": ') : -1]
MARKED = f"<tool_call>\n{SAID}\n</tool_call>"
CALLING = f"I will look.\n{MARKED}\n{MARKED}"
CUTS = [(SAID,), tuple(SAID), ("<tool_call>\n", SAID, "\n</tool_call>"), tuple(MARKED)]


class City(BaseModel):
    name: str
    people: int


def test_tools_reach_the_engine(caught: Caught) -> None:
    tool = core.Tool("weather", "Of a city.", json.dumps(PARAMETERS))
    assert caught.request(tools=[TOOL]).tools == core.Tools((tool,))
    assert caught.request(tools=[TOOL], tool_choice="auto").tools == core.Tools((tool,))
    assert caught.request(tools=[TOOL], tool_choice="none").tools is None
    assert caught.request(tools=[TOOL], tool_choice="required").tools == core.Tools((tool,), True)
    named = {"type": "function", "function": {"name": "weather"}}
    assert caught.request(tools=[TOOL], tool_choice=named).tools == core.Tools((tool,), True, "weather")
    bare = {"type": "function", "function": {"name": "now", "strict": True}}
    (tool,) = caught.request(tools=[bare]).tools.offered
    assert json.loads(tool.parameters) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_schemas_reach_the_engine(caught: Caught) -> None:
    assert caught.request(response_format={"type": "text"}).sampling.json_schema is None
    assert caught.request(response_format={"type": "json_object"}).sampling.json_schema == '{"type": "object"}'
    asked = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS}}
    assert json.loads(caught.request(response_format=asked).sampling.json_schema) == PARAMETERS


@pytest.mark.parametrize("said", CUTS, ids=["whole", "characters", "marked", "marked characters"])
def test_a_call_stands_in_tool_calls(said: tuple[str, ...]) -> None:
    form = HERMES if said[0][0] == "<" else core.CallForm()
    with serving(FakeEngine(tokens=said, call_form=form)) as served:
        client = served.client()
        choice = client.chat.completions.create(**CHAT, tools=[TOOL]).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
        with client.chat.completions.stream(**CHAT, tools=[TOOL]) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls" and not streamed.message.content
        (again,) = streamed.message.tool_calls
        assert (again.function.name, again.function.arguments) == ("weather", ARGUMENTS) and again.id != call.id
        plain = client.chat.completions.create(**CHAT).choices[0]
        assert plain.message.content == "".join(said), "without tools it is a text"


@pytest.mark.parametrize(
    "text", [TEXT, "", "<b>", "<tool", '{"name": 5}', '{"name": "x", "age": 3}', '{"na', "{}", ' {"name": "f"', "[1]"]
)
def test_what_is_no_call_is_a_text(text: str) -> None:
    for cuts, form in product(([text], list(text)), (core.CallForm(), HERMES)):
        reader = CallReader(form)
        pieces = [piece for cut in cuts for piece in reader.push(cut)] + reader.finish()
        assert "".join(piece.said for piece in pieces) == text and not reader.names


@pytest.mark.parametrize("cuts", [(CALLING,), tuple(CALLING)])
def test_a_text_and_several_calls_are_told_apart(cuts: tuple[str, ...]) -> None:
    flat: Any = {"type": "function", **TOOL["function"]}
    with serving(FakeEngine(tokens=cuts, call_form=HERMES, context_length=1000)) as served:
        client = served.client()
        choice = client.chat.completions.create(**CHAT, tools=[TOOL], max_tokens=400).choices[0]
        with client.chat.completions.stream(**CHAT, tools=[TOOL], max_tokens=400) as stream:
            streamed = stream.get_final_completion().choices[0]
        whole = client.responses.create(model="fake", input="?", max_output_tokens=400, tools=[flat])
    for found in (choice, streamed):
        assert (found.finish_reason, found.message.content) == ("tool_calls", "I will look.")
        assert [call.function.arguments for call in found.message.tool_calls] == [ARGUMENTS] * 2
        assert len({call.id for call in found.message.tool_calls}) == 2
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "I will look." and whole.output[2].arguments == ARGUMENTS


def test_a_text_beside_tools_streams_at_once(shared: Served) -> None:
    chunks = list(shared.client().chat.completions.create(**CHAT, tools=[TOOL], stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks[1:3]] == ["The", " light"]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_call_that_max_tokens_cut_says_so() -> None:
    with serving(FakeEngine(tokens=tuple(SAID))) as served:
        choice = served.client().chat.completions.create(**CHAT, tools=[TOOL], max_tokens=45).choices[0]
    assert choice.finish_reason == "length"
    assert ARGUMENTS.startswith(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_is_told_as_one_only_if_it_is_whole(whole: bool) -> None:
    """A stop string may cut it: the engine's text then ends within it."""
    tokens = SAID if whole else SAID[: SAID.index("}") - 2]
    with serving(FakeEngine(tokens=tuple(tokens))) as served:
        client = served.client()
        choice = client.chat.completions.create(**CHAT, tools=[TOOL]).choices[0]
        *_, last = client.chat.completions.create(**CHAT, tools=[TOOL], stream=True)
    assert choice.finish_reason == last.choices[0].finish_reason == ("tool_calls" if whole else "stop")
    assert choice.message.tool_calls[0].function.name == "weather"


def test_several_choices_call_each_for_itself() -> None:
    with serving(FakeEngine(tokens=tuple(SAID))) as served:
        answer = served.client().chat.completions.create(**CHAT, tools=[TOOL], n=2)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert [call.function.arguments for call in calls] == [ARGUMENTS] * 2 and calls[0].id != calls[1].id


def test_the_answer_of_a_tool_comes_back(caught: Caught) -> None:
    with serving(FakeEngine(tokens=(SAID,))) as served:
        said = served.client().chat.completions.create(**CHAT, tools=[TOOL]).choices[0].message
    call = said.tool_calls[0]
    told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    caught.served.client().chat.completions.create(model="fake", messages=[*MESSAGES, said, told], tools=[TOOL])
    messages = caught.engine.requests[-1].messages
    assert messages[1:] == (
        core.Message("assistant", "", (core.ToolCall(call.id, "weather", ARGUMENTS),)),
        core.Message("tool", "rain", (), call.id),
    )


def test_what_the_client_parsed_comes_back(caught: Caught) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True, "parameters": {
        **PARAMETERS, "additionalProperties": False}}}  # fmt: skip
    with serving(FakeEngine(tokens=('{"name": "weather", "arguments": {"city": "Ghent"}}',))) as served:
        said = served.client().chat.completions.parse(**CHAT, tools=[strict]).choices[0].message
    call = said.tool_calls[0]
    assert call.function.parsed_arguments == {"city": "Ghent"}
    told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = caught.served.client().chat.completions.create(
        model="fake", messages=[*MESSAGES, said, told], tools=[strict]
    )
    named = "messages[].tool_calls[].function.parsed_arguments"
    assert any(notice.endswith(named) for notice in answer.rag["notices"])
    assert caught.engine.requests[-1].messages[1].tool_calls == (
        core.ToolCall(call.id, "weather", call.function.arguments),
    )


def test_parse_of_openai() -> None:
    with serving(FakeEngine(tokens=('{"name": "Ghent", ', '"people": 270000}'))) as served:
        client = served.client()
        parsed = client.chat.completions.parse(**CHAT, response_format=City).choices[0].message.parsed
        assert parsed == City(name="Ghent", people=270000)
    with serving(FakeEngine(tokens=('{"name": "Gh', "ent"))) as served:
        client = served.client()
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**CHAT, response_format=City, max_tokens=1)


def test_what_other_servers_call_a_schema_is_one(caught: Caught) -> None:
    form = {"type": "json_object", "schema": PARAMETERS}
    assert json.loads(caught.request(response_format=form).sampling.json_schema) == PARAMETERS
    strict = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": PARAMETERS}}
    assert (
        caught.request(response_format=strict).sampling.strict
        and not caught.request(response_format=form).sampling.strict
    )
    assert caught.request(tools=[TOOL], parallel_tool_calls=False).tools.several is False
    assert caught.request(chat_template_kwargs={"enable_thinking": False}).template == {"enable_thinking": False}


def test_values_that_stand_for_off_are_taken(caught: Caught) -> None:
    assert caught.request(seed=-1, top_k=-1, stop="", min_p=0).sampling == caught.request().sampling
    assert caught.request(top_p=0, temperature=1).sampling.top_k == 1
