"""POST /v1/responses: what a body becomes for the engine, the response, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from ragjax import core
from tests.support import tiny
from tests.support.fakes import FakeEngine
from tests.support.serving import TEXT, Caught, Served, error_of, events_of, serving, typed_of, wait_for
from tests.support.telling import SOURCES

ASK: dict[str, Any] = {"model": "fake", "input": "What colour is the lighthouse?"}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": EMPTY, "strict": True}
CALL = ('{"name": "weather", ', '"arguments": {"city"', ': "Ghent"}}')


def typed(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked for framing and numbers."""
    events = typed_of(served.post("/v1/responses", json={**ASK, "stream": True, **fields}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def asked(caught: Caught, **fields: Any) -> core.Request:
    response = caught.served.post("/v1/responses", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    return caught.engine.requests[-1]


def refused(served: Served, **fields: Any) -> dict[str, Any]:
    response = served.post("/v1/responses", json={**ASK, **fields})
    assert response.status_code == 400, response.text
    return error_of(response)


# ------------------------------------------------------------------------------------- what is asked for


def test_a_text_is_what_chat_would_ask(caught: Caught) -> None:
    assert asked(caught) == core.Request((core.Message("user", ASK["input"]),), sampling=core.Sampling(None))


def test_fields_reach_the_engine(caught: Caught) -> None:
    request = asked(
        caught,
        instructions="Be brief.",
        max_output_tokens=3,
        temperature=1,
        top_p=0.5,
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}},
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        rag={"knowledge": "demo", "top_k": 2, "strategy": "naive", "recompute_ratio": 0.5},
    )
    assert request.messages[0] == core.Message("system", "Be brief.")
    assert request.sampling == core.Sampling(3, 1, 0.5, logprobs=2, json_schema='{"type": "integer"}', strict=True)
    assert request.tools.named == "weather" and request.tools.required
    assert request.rag == core.Rag("demo", 2, "naive", None, 0.5)
    assert asked(caught, rag=None).rag is None


def test_items_become_a_chat(caught: Caught) -> None:
    """A response's own output is sent back as it is; what only tells of a search or a thought is left out."""
    a, b, rain = ({"type": "input_text", "text": text} for text in ("a", "b", "rain"))
    said = [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    items = [
        {"role": "developer", "content": [a, b]},
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["x"], "results": None},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": said},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "weather", "arguments": "[]"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "function_call_output", "call_id": "c2", "output": [rain]},
    ]
    request = asked(caught, input=items)
    calls = (core.ToolCall("c1", "weather", "{}"), core.ToolCall("c2", "weather", "[]"))
    assert request.messages == (
        core.Message("system", "a\nb"),
        core.Message("user", "Weather?"),
        core.Message("assistant", "I look.", calls),
        core.Message("tool", "sun", tool_call_id="c1"),
        core.Message("tool", "rain", tool_call_id="c2"),
    )


def test_a_search_is_a_retrieval(caught: Caught) -> None:
    bounds = {"max_num_results": 7, "ranking_options": {"score_threshold": 0.25}}
    search = {"type": "file_search", "vector_store_ids": ["demo"], **bounds}
    request = asked(caught, tools=[search], rag={"strategy": "naive"})
    assert request.rag == core.Rag(None, 7, "naive", sources=(core.Source("demo"),), min_score=0.25)
    assert request.tools is None
    filtered = {**search, "filters": {"type": "eq", "key": "lang", "value": "en"}}
    rag = asked(caught, tools=[filtered, WEATHER], tool_choice="required").rag
    assert rag.sources == (core.Source("demo", frozenset()),), "documents of the server's own have no attributes"
    assert asked(caught, tools=[filtered, WEATHER], tool_choice={"type": "file_search"}).tools is None
    assert asked(caught, tools=[search], tool_choice="required").tools is None
    assert asked(caught, tools=[search], tool_choice="none").rag == core.Rag()


def test_what_has_no_effect_is_said(shared: Served) -> None:
    fields = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "user": "u", "newest": 1}
    made = shared.post("/v1/responses", json={**ASK, **fields, "include": ["reasoning.encrypted_content"]}).json()
    (known, unknown, *_) = made["rag"]["notices"]
    assert all(name in known for name in ("reasoning", "text.verbosity", "user")) and "newest" in unknown
    assert any("reasoning.encrypted_content" in notice for notice in made["rag"]["notices"])


def test_unknown_fields_of_tools_and_of_their_choice_are_ignored(caught: Caught) -> None:
    search = {
        **{"type": "file_search", "vector_store_ids": ["demo"], "w": 1},
        "ranking_options": {"score_threshold": 0.5, "hybrid_search": {}},
        "filters": {"type": "ne", "key": "a", "value": 1, "v": 1},
    }
    choice = {"type": "function", "name": "weather", "strict": True}
    body = {**ASK, "tools": [WEATHER, search], "tool_choice": choice}
    made = caught.served.post("/v1/responses", json=body).json()
    (notice, *_) = made["rag"]["notices"]
    paths = notice.removeprefix("fields of the request, unknown and ignored: ").split(", ")
    tools = ["w", "filters.v", "ranking_options.hybrid_search"]
    assert paths == [*(f"tools[].{name}" for name in tools), "tool_choice.strict"]
    rag = caught.engine.requests[-1].rag
    assert rag.sources == (core.Source("demo"),), "all of the server's own pass"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items of the conversation in input"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation", "send the earlier items"),
        ({"background": True}, "background", "leave it out"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "the type 'web_search_call' is not served"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]},
            "input[0].content[0].type",
            "",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "these are: 'function', 'file_search'"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a"]}] * 2}, "tools", "one file_search tool"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a", "a"]}]}, "tools", "given twice"),
        (
            {"tools": [{"type": "file_search", "vector_store_ids": [str(n) for n in range(17)]}]},
            "tools[0].vector_store_ids",
            "16",
        ),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["demo"]}], "rag": {"top_k": 1}}, "rag.top_k", "both"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "no such tool"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "must name one of the tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs a schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "does not go with"),
        ({"tool_choice": {"type": "required", "name": "f"}, "tools": [WEATHER]}, "tool_choice.name", "does not go"),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"max_output_tokens": 900}, "input", "context"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"rag": {"strategy": "magic"}}, "rag.strategy", "unknown strategy"),
    ],
)
def test_bad_input(shared: Served, fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(shared, **fields)
    assert error["param"] == param and words in error["message"]


# ------------------------------------------------------------------------------------------ the response


def test_a_whole_response(shared: Served) -> None:
    made = shared.post("/v1/responses", json={**ASK, "metadata": {"a": "b"}, "instructions": "Brief."}).json()
    (item,) = made["output"]
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (made["object"], made["status"]) == ("response", "completed")
    assert made["error"] is made["incomplete_details"] is None
    assert made["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert made["metadata"] == {"a": "b"} and made["instructions"] == "Brief." and made["tool_choice"] == "auto"
    assert made["rag"]["strategy"] == "prefix" and made["rag"]["segments"][0]["id"] == "system"


def test_a_response_that_is_cut(shared: Served) -> None:
    made = shared.post("/v1/responses", json={**ASK, "max_output_tokens": 2}).json()
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["output"][0]["status"] == "incomplete"
    assert typed(shared, max_output_tokens=2)[-1]["type"] == "response.incomplete"


def test_logprobs(shared: Served) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = shared.post("/v1/responses", json={**ASK, **fields}).json()["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == list(FakeEngine().tokens)
    assert part["logprobs"][0]["top_logprobs"][1] == {"token": "other", "logprob": -9999.0, "bytes": list(b"other")}
    deltas = [event for event in typed(shared, **fields) if event["type"].endswith("text.delta")]
    assert [event["logprobs"][0]["token"] for event in deltas] == list(FakeEngine().tokens)


@pytest.mark.parametrize("tokens", [("{", '"na', "me", "!"), ("{", '"na', ""), ("a", "", "b", "")])
def test_no_log_probabilities_are_lost_of_what_may_become_a_call(tokens: tuple[str, ...]) -> None:
    with serving(FakeEngine(tokens=tokens)) as served:
        events = typed(served, top_logprobs=0, tools=[WEATHER])
    (item,) = events[-1]["response"]["output"]
    (part,) = item["content"]
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["token"] for entry in part["logprobs"]] == list(tokens)
    assert told == part["logprobs"] and part["text"] == "".join(tokens)


def test_the_events_of_a_text(shared: Served) -> None:
    events = typed(shared)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 6,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == TEXT
    assert events[2]["item"]["content"] == [] and events[3]["part"]["text"] == ""
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]] and events[-4]["text"] == TEXT and last["usage"] and last["rag"]
    assert len({event["item_id"] for event in events if "item_id" in event} | {events[-2]["item"]["id"]}) == 1


def test_a_call_of_a_function() -> None:
    with serving(FakeEngine(tokens=CALL)) as served:
        events = typed(served, tools=[WEATHER])
        whole = served.post("/v1/responses", json={**ASK, "tools": [WEATHER]}).json()
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    arguments = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
    assert json.loads(arguments) == {"city": "Ghent"} and events[-3]["arguments"] == arguments
    for item in (whole["output"][0], events[-1]["response"]["output"][0]):
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", arguments)
        assert item["call_id"].startswith("call_") and item["status"] == "completed"


def test_a_stream_that_breaks_fails() -> None:
    with serving(FakeEngine(breakdown=RuntimeError("secret"))) as served:
        events = typed(served)
        failed = events[-1]
        kept = served.get(f"/v1/responses/{failed['response']['id']}").json()
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error" and "secret" not in json.dumps(failed)
    assert [item["status"] for item in failed["response"]["output"]] == ["incomplete"]
    assert Response.model_validate(failed["response"], strict=True).error is not None
    assert kept == failed["response"], "what broke off is kept, too"


def test_a_stream_whose_client_leaves_is_kept_with_its_sources() -> None:
    with serving(FakeEngine(delay=0.2, sources=SOURCES)) as served:
        client = served.client()
        with client.responses.create(**ASK, stream=True) as stream:
            events = iter(stream)
            made = next(event.response for event in events if event.type == "response.created")
            next(event for event in events if event.type == "response.output_text.delta")

        def is_kept() -> bool:
            return served.get(f"/v1/responses/{made.id}").status_code == 200

        wait_for(is_kept)
        kept = client.responses.retrieve(made.id)
        assert kept.status == "cancelled" and kept.output_text and TEXT.startswith(kept.output_text)
        assert [one["file_id"] for one in kept.rag["sources"]] == [one.file_id for one in SOURCES]
        client.responses.create(model="fake", input="And then?", previous_response_id=made.id)


def test_an_error_before_the_first_text_is_one_of_http() -> None:
    with serving(FakeEngine(error=core.OverloadError("full", retry_after=2))) as served:
        response = served.post("/v1/responses", json={**ASK, "stream": True})
    assert response.status_code == 429 and error_of(response)["code"] == "rate_limit_exceeded"


# ------------------------------------------------------------------------------------------ with a search


class Colour(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "blue"]


def test_a_search_cites_the_files_whose_passages_are_in_the_prompt() -> None:
    with tiny.engine() as engine, serving(engine) as served:
        client = served.client(timeout=120)

        def kept(name: str, text: str, store: str, **attributes: int) -> str:
            file = client.files.create(file=(f"{name}.md", f"# {name}\n\n{text}".encode()), purpose="assistants").id
            poll = client.vector_stores.files.create_and_poll
            done = poll(file, vector_store_id=store, attributes=attributes, poll_interval_ms=10)
            assert done.status == "completed", done.last_error
            return file

        def searched(tool: Any) -> Any:
            return client.responses.create(**{**asked, "tools": [tool]}, include=["file_search_call.results"])

        store = client.vector_stores.create(name="harbour")
        names = enumerate(("ferry", "lighthouse", "mill"), 1)
        files = [kept(name, f"The {name} is {name}.", store.id, year=year) for year, name in names]
        search: Any = {"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 2}
        asked: Any = {"model": "tiny", "input": "The lighthouse", "tools": [search], "max_output_tokens": 6}
        made = searched(search)
        call, message = made.output
        assert call.queries == ["The lighthouse"] and call.status == "completed"
        assert call.results[0].filename == "lighthouse.md" and len(call.results) == 2
        assert call.results[0].attributes == {"year": 2} and "lighthouse is lighthouse" in call.results[0].text
        part = message.content[0]
        assert [a.file_id for a in part.annotations] == [result.file_id for result in call.results]
        assert all(a.type == "file_citation" and a.index == len(part.text) for a in part.annotations)
        assert [one["filename"] for one in made.rag["sources"]] == [a.filename for a in part.annotations]

        filtered: Any = {**search, "filters": {"type": "gte", "key": "year", "value": 3}}
        made = client.responses.create(**{**asked, "tools": [filtered]})
        assert [a.filename for a in made.output[1].content[0].annotations] == ["mill.md"]
        assert made.output[0].results is None

        both = client.vector_stores.create(name="both", file_ids=[files[1]])
        kept("lamp", "The lighthouse lamp is bright.", both.id)
        union: Any = {**search, "vector_store_ids": [store.id, both.id], "max_num_results": 4}
        results = searched(union).output[0].results
        assert sorted(r.filename for r in results) == ["ferry.md", "lamp.md", "lighthouse.md", "mill.md"]
        assert [r.score for r in results] == sorted((r.score for r in results), reverse=True)
        assert {r.filename: r.attributes for r in results}["lighthouse.md"] == {"year": 2}, "of the first store"
        second: Any = {**union, "filters": {"type": "ne", "key": "year", "value": 2}}
        results = searched(second).output[0].results
        assert {r.filename: r.attributes for r in results}["lighthouse.md"] == {}, "of the second"

        rag = {"rag": {"knowledge": store.id, "top_k": 2}}
        plain = client.responses.create(model="tiny", input="The lighthouse", max_output_tokens=6, extra_body=rag)
        assert [item.type for item in plain.output] == ["message"] and plain.output_text == part.text
        with client.responses.stream(**asked) as stream:
            events = list(stream)
        kinds, final = [event.type for event in events], events[-1].response
        assert final.output_text == part.text and len(final.output[1].content[0].annotations) == 2
        steps = (f"response.file_search_call.{step}" for step in ("in_progress", "searching", "completed"))
        assert kinds[2:7] == ["response.output_item.added", *steps, "response.output_item.done"]
        assert kinds.count("response.output_text.annotation.added") == 2
        assert [(one["file_id"], one["knowledge"]) for one in final.rag["sources"]] == [
            (a.file_id, store.id) for a in part.annotations
        ]
        log = core.Document("log", "The lighthouse keeper.", places=(core.Place(0, 4, "Nights"),), filename="log.pdf")
        engine.add_documents([log], "logs")
        made = searched({**search, "vector_store_ids": ["logs"]})
        (citation,), (result,) = made.output[1].content[0].annotations, made.output[0].results
        assert [(one.filename, one.page, one.heading) for one in (citation, result)] == [("log.pdf", 4, "Nights")] * 2
        (found,) = client.vector_stores.search("logs", query="keeper").data
        assert (found.filename, found.page, found.heading) == ("log.pdf", 4, "Nights")
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2, "stream": True}
        *_, last, _ = events_of(served.post("/v1/chat/completions", json={**body, "rag": {"knowledge": "logs"}}))
        (source,) = last["rag"]["sources"]
        assert (source["segment"], source["filename"], source["page"]) == (1, "log.pdf", 4)
        assert "keeper" in source["text"]


def test_parse_and_tools_by_the_client_against_an_engine_in_miniature() -> None:
    with tiny.engine() as engine, serving(engine) as served:
        client = served.client(timeout=120)
        asked: Any = {"model": "tiny", "input": "Hi", "temperature": 1.5}
        parsed = client.responses.parse(**asked, text_format=Colour, max_output_tokens=200)
        assert isinstance(parsed.output_parsed, Colour)
        tool: Any = {"type": "function", "name": "now"}
        made = client.responses.create(**asked, tools=[tool], tool_choice="required", max_output_tokens=200)
        (call,) = made.output
        assert call.type == "function_call" and made.status == "completed"
        told: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        again = client.responses.create(
            model="tiny", input=[{"role": "user", "content": "Hi"}, call, told], max_output_tokens=3
        )
        assert again.usage.output_tokens == 3


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"'])
@pytest.mark.parametrize("where", ["tools", "text"])
def test_a_schema_that_no_json_text_holds(shared: Served, where: str, value: str) -> None:
    """It is refused where no grammar is made of it, too; the response repeats it."""
    schema = {"type": "object", "default": "VALUE"}
    given: dict[str, Any] = {
        "tools": {"tools": [{**WEATHER, "parameters": schema}], "tool_choice": "none"},
        "text": {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
    }[where]
    for stream in (False, True):
        body = json.dumps({**ASK, **given, "stream": stream}).replace('"VALUE"', value)
        response = shared.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400 and error_of(response)["code"] == "invalid_schema", response.text


def test_a_conversation_goes_on_from_what_is_kept(caught: Caught) -> None:
    client = caught.served.client()
    first = client.responses.create(**ASK, instructions="Be brief.")
    assert first.store is True
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    items: Any = [{"role": "user", "content": "And now?"}, call, output]
    second = client.responses.create(model="fake", input=items, previous_response_id=first.id, stream=True)
    last = next(event.response for event in second if event.type == "response.completed")
    assert last.previous_response_id == first.id
    client.responses.create(model="fake", input="Why?", previous_response_id=last.id)
    said = [(one.role, one.content) for one in caught.engine.requests[-1].messages]
    assert said == [
        *(("user", ASK["input"]), ("assistant", TEXT), ("user", "And now?"), ("assistant", ""), ("tool", "rain")),
        *(("assistant", TEXT), ("user", "Why?")),
    ]
    listed = client.responses.input_items.list(last.id, order="asc").data
    assert [item.type for item in listed] == [None, "function_call", "function_call_output"]
    kept = client.responses.retrieve(last.id)
    assert kept.output_text == TEXT and kept.usage == last.usage
    client.responses.delete(first.id)
    error = refused(caught.served, previous_response_id=last.id)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert caught.served.get(f"/v1/responses/{first.id}").status_code == 404
    assert caught.served.post("/v1/responses", json={**ASK, "store": False}).json()["store"] is False


def test_a_response_is_its_tenants(caught: Caught) -> None:
    keys = {"a" * 16: "one", "b" * 16: "two"}
    with serving(FakeEngine(), keys=keys) as served:
        one, two = (served.client(api_key=key) for key in keys)
        made = one.responses.create(**ASK)
        for call in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            two.responses.create(**ASK, previous_response_id=made.id)
        unkept = one.responses.create(**ASK, store=False)
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(unkept.id)
        assert one.responses.retrieve(made.id).id == made.id
