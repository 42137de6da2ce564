"""The chat model against a server: documents, the account of reuse, streams, tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_ragjax import ChatRagjax
from pydantic import BaseModel, ConfigDict

ASK = "Which door is red?"
DOORS = [
    Document("The north door is red.", id="north", metadata={"title": "North"}),
    Document("The south door is blue.", metadata={"title": "South"}),
]


class Cat(BaseModel):
    """A cat or a dog."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    old: bool


def made(url: str, **fields: Any) -> ChatRagjax:
    return ChatRagjax(model="tiny", base_url=url, max_tokens=8, **fields)


def chunks(message: BaseMessage) -> dict[str, dict[str, Any]]:
    """Of the account, the segments of documents by title."""
    return {segment["title"]: segment for segment in message.response_metadata["rag"]["segments"] if segment["title"]}


def test_documents_are_passages_that_are_reused_in_another_order(url: str) -> None:
    chat = made(url, rag={"strategy": "naive"})
    chat.invoke(ASK, documents=DOORS)
    again = chat.invoke(ASK, documents=DOORS[::-1])
    found = chunks(again)
    assert list(found) == ["South", "North"] and found["North"]["id"] == "north#0"
    assert all(segment["reused"] == segment["tokens"] > 0 for segment in found.values())
    assert again.response_metadata["rag"]["strategy"] == "naive" and again.usage_metadata is not None
    assert again.usage_metadata["input_token_details"]["cache_read"] >= sum(s["reused"] for s in found.values())


def test_the_fields_of_a_call_come_before_those_of_the_model(url: str) -> None:
    chat = made(url, rag={"strategy": "naive", "top_k": 0})
    assert chat.invoke(ASK, rag={"strategy": "full"}).response_metadata["rag"]["strategy"] == "full"
    with pytest.raises(openai.BadRequestError, match="documents or top_k"):
        chat.invoke(ASK, documents=DOORS)


def test_a_stream_ends_with_the_account(url: str) -> None:
    whole: AIMessageChunk | None = None
    for chunk in made(url).stream(ASK, documents=DOORS):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and list(chunks(whole)) == ["North", "South"]
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["model_provider"] == "ragjax"


def test_it_answers_without_blocking(url: str) -> None:
    answer = asyncio.run(made(url).ainvoke(ASK, documents=DOORS))
    assert list(chunks(answer)) == ["North", "South"]


def test_a_tool_is_called_with_documents(url: str) -> None:
    chat = made(url, max_retries=0).bind_tools([Cat], tool_choice="any")
    answer = chat.invoke(ASK, documents=DOORS, max_tokens=200)
    (call,) = answer.tool_calls
    assert call["name"] == "Cat" and Cat.model_validate(call["args"])
    assert list(chunks(answer)) == ["North", "South"]


def test_structured_output_is_an_instance(url: str) -> None:
    chat = ChatRagjax(model="tiny", base_url=url, max_tokens=200)
    answer = chat.with_structured_output(Cat, include_raw=True, documents=DOORS).invoke(ASK)
    assert isinstance(answer["parsed"], Cat) and list(chunks(answer["raw"])) == ["North", "South"]
    assert isinstance(chat.with_structured_output(Cat).invoke(ASK, documents=DOORS), Cat)


@pytest.mark.parametrize("given", ["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/", "http://127.0.0.1:1"])
def test_its_address_and_key_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("RAGJAX_BASE_URL", given)
    monkeypatch.setenv("RAGJAX_API_KEY", "sk-one")
    monkeypatch.setenv("OPENAI_API_KEY", "never this")
    chat = ChatRagjax(model="tiny")
    assert chat.openai_api_base == "http://127.0.0.1:1/v1" and chat.openai_api_key.get_secret_value() == "sk-one"


@pytest.mark.parametrize("given", [{}, {"base_url": "", "api_key": ""}, {"base_url": None, "api_key": None}])
def test_an_empty_address_or_key_counts_as_unset(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setenv("RAGJAX_BASE_URL", "")
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    monkeypatch.setenv("OPENAI_API_KEY", "never this")
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:1/v1")
    client = ChatRagjax(model="tiny", **given).root_client
    assert str(client.base_url) == "http://127.0.0.1:8000/v1/" and client.api_key == "none"
