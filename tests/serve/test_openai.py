"""Responses, as OpenAI's own client reads them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import openai
import pytest

from ragjax import core
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, MESSAGES, TEXT, Served, error_of, events_of, serving


def test_chat_with_openai_client(shared: Served) -> None:
    answer = shared.client().chat.completions.create(**CHAT)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "fake"
    assert abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 6, 11)
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert choice.logprobs is None
    rag = answer.model_extra["rag"]
    assert (rag["strategy"], rag["exact_to"], rag["approximate"]) == ("prefix", "full", False)
    assert (rag["recompute_ratio"], rag["predicted"]) == (None, {"kl": 0.0, "top1": 1.0})
    chunk = {"id": "harbour#0", "title": "The harbour", "tokens": 4, "reused": 2, "recomputed": 2}
    assert rag["segments"][1] == {**chunk, "tier": None, "score": 0.75}
    assert set(rag["timings_ms"]) == {"retrieve", "search_exposed", "load", "compile", "prefill", "ttft", "total"}
    assert rag["notices"] == ["attention not by triton: no such kernel"]


def test_detail_names_tokens_of_each_segment(shared: Served) -> None:
    asked = {"rag": {"detail": True}}
    for rag in (
        shared.client().chat.completions.create(**CHAT, extra_body=asked).model_extra["rag"],
        events_of(shared.post(json={**CHAT, **asked, "stream": True}))[-2]["rag"],
    ):
        system, chunk = rag["segments"]
        assert system["pieces"] == [" 0", " 1", " 2", " 3", " 4"] and system["recomputed_at"] == []
        assert chunk["pieces"] == [" 5", " 6", " 7", " 8"]
        assert chunk["recomputed_at"] == [[1, 2], [3, 4]]
    assert error_of(shared.post(json={**CHAT, "rag": {"detail": 1}}))["param"] == "rag.detail"


def test_an_approximate_answer_says_so(shared: Served) -> None:
    asked = {"rag": {"strategy": "naive", "recompute_ratio": 0.5}}
    answer = shared.client().chat.completions.create(**CHAT, extra_body=asked)
    rag = answer.model_extra["rag"]
    assert (rag["exact_to"], rag["approximate"], rag["recompute_ratio"]) == (None, True, 0.5)
    assert rag["predicted"] == {"kl": 0.25, "top1": 0.75}
    assert rag["figures"] == {"focus_ideal": 0.5}


def test_chat_stream_with_openai_client(shared: Served) -> None:
    chunks = list(shared.client().chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    *said, final, usage = chunks
    assert said[0].choices[0].delta.role == "assistant" and said[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in said) == TEXT
    assert len(said) == 7, "the role, then a chunk for each token"
    assert final.choices[0].finish_reason == "stop" and final.model_extra["rag"]["strategy"] == "prefix"
    assert all(chunk.usage is None for chunk in [*said, final])
    assert usage.choices == [] and usage.usage.total_tokens == 11
    assert usage.usage.prompt_tokens_details.cached_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_chat_logprobs(shared: Served) -> None:
    client = shared.client()
    content = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(token.token for token in content) == TEXT
    assert content[1].bytes == list(b" light") and content[1].logprob == -0.25
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("The", -0.25), ("other", -9999.0)]
    assert client.chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    stream = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=1, stream=True)
    streamed = [t.token for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert "".join(streamed) == TEXT


def test_a_piece_of_a_character_has_its_bytes() -> None:
    with serving(FakeEngine(tokens=("\ufffd", "é"))) as served:
        content = served.client().chat.completions.create(**CHAT, logprobs=True).choices[0].logprobs.content
    assert content[0].bytes == [0xC3] and content[1].bytes == [0xC3, 0xA9]


def test_completion_with_openai_client(shared: Served) -> None:
    client = shared.client()
    answer = client.completions.create(model="fake", prompt="The lighthouse", max_tokens=4, logprobs=2)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("The lighthouse is", "length")
    assert choice.logprobs.tokens == ["The", " light", "house", " is"]
    assert choice.logprobs.text_offset == [0, 3, 9, 14]
    assert choice.logprobs.token_logprobs == [-0.25] * 4
    assert choice.logprobs.top_logprobs[0] == {"The": -0.25, "other": -9999.0}
    assert answer.usage.prompt_tokens_details.cached_tokens == 7 and answer.model_extra["rag"]["strategy"] == "prefix"


def test_a_prompt_comes_back_with_its_answer() -> None:
    class Echoing(FakeEngine):
        async def _generate(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
            async for event in super()._generate(request):
                if request.echo and isinstance(event, core.Answer):
                    event = replace(event, logprobs=told)
                yield event

    told = core.TokenLogprob("A", 65, float("nan")), core.TokenLogprob(" b", 66, -1.5, ((" b", 66, -1.5),), 1)
    asked: Any = {"model": "fake", "prompt": "A b", "echo": True}
    with serving(Echoing()) as served:
        client = served.client()
        scored = client.completions.create(**asked, logprobs=1, max_tokens=0)
        both = client.completions.create(**asked, logprobs=1, max_tokens=1)
        streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
        assert client.completions.create(**asked).choices[0].text == streamed == f"A b{TEXT}"
    choice = scored.choices[0]
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == ("A b", "length", 0)
    assert choice.logprobs.tokens == ["A", " b"] and choice.logprobs.token_logprobs == [None, -1.5]
    assert choice.logprobs.top_logprobs == [None, {" b": -1.5}]
    assert both.choices[0].logprobs.tokens == ["A", " b", "The"] and both.choices[0].text == "A bThe"
    assert both.choices[0].logprobs.text_offset == [0, 1, 3] and both.usage.completion_tokens == 1


def test_completion_stream(shared: Served) -> None:
    chunks = list(shared.client().completions.create(model="fake", prompt=["a b"], stream=True, logprobs=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 6 + ["stop"]
    assert [c.choices[0].logprobs.text_offset for c in chunks[:-1]] == [[0], [3], [9], [14], [17], [21]]
    assert chunks[-1].model_extra["rag"]["exact_to"] == "full"


def test_models(shared: Served) -> None:
    client = shared.client()
    model, _, encoder = client.models.list().data
    assert encoder.id == "fake-encoder" and client.models.retrieve("fake-encoder").id == "fake-encoder"
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "ragjax")
    rag = model.model_extra["rag"]
    assert rag["strategies"] == ["full", "prefix", "naive"] and rag["graphs"] == ["facts"]
    assert (rag["default_strategy"], rag["default_recompute_ratio"]) == ("prefix", None)
    assert client.models.retrieve("fake").model_extra["context_length"] == 64
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert shared.get("/v1/models/").json() == shared.get("/v1/models").json()


def test_model_name_with_slash() -> None:
    with serving(FakeEngine(model_name="org/model")) as served:
        assert served.client().models.retrieve("org/model").id == "org/model"


def test_openai_error_classes(shared: Served) -> None:
    client = shared.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as strategy:
        client.chat.completions.create(**CHAT, extra_body={"rag": {"strategy": "magic"}})
    assert strategy.value.param == "rag.strategy" and "prefix" in strategy.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**CHAT, max_tokens=100)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(**CHAT, temperature=3)
    assert hot.value.param == "temperature"


def test_overload_is_429_with_retry_after() -> None:
    with serving(FakeEngine(max_queue=0)) as served:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as full:
                served.client().chat.completions.create(**CHAT, stream=stream)
            assert int(full.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("seconds", "header"), [(None, "1"), (0.2, "1"), (2.01, "3"), (40.0, "40")])
def test_overload_says_when_there_is_a_place(seconds: float | None, header: str) -> None:
    with serving(FakeEngine(error=core.OverloadError("the queue is full", retry_after=seconds))) as served:
        assert served.post(json=CHAT).headers["retry-after"] == header
