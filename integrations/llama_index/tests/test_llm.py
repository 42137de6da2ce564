"""The LLM against a server: documents, the account of reuse, streams, tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_ragjax import Ragjax
from llama_index_ragjax.passage import passages
from pydantic import BaseModel, ConfigDict

ASK = [ChatMessage("Which door is red?", role="user")]
DOORS = [
    TextNode(id_="north", text="The north door is red.", metadata={"title": "North"}),
    NodeWithScore(node=TextNode(id_="south", text="The south door is blue.", metadata={"title": "South"}), score=1),
]


class Cat(BaseModel):
    """A cat or a dog."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    old: bool


def made(url: str, **fields: Any) -> Ragjax:
    return Ragjax(model="tiny", api_base=url, **{"max_tokens": 8, **fields})


def chunks(rag: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of an account, the segments of documents by title."""
    return {segment["title"]: segment for segment in rag["segments"] if segment["title"]}


def test_documents_are_passages_that_are_reused_in_another_order(url: str) -> None:
    llm = made(url, rag={"strategy": "naive"})
    llm.chat(ASK, documents=DOORS)
    answer = llm.chat(ASK, documents=DOORS[::-1])
    found = chunks(answer.additional_kwargs["rag"])
    assert list(found) == ["South", "North"] and found["North"]["id"] == "north#0"
    assert all(segment["reused"] == segment["tokens"] > 0 for segment in found.values())
    assert answer.additional_kwargs["completion_tokens"] > 0


def test_the_fields_of_a_call_come_before_those_of_the_model(url: str) -> None:
    answer = made(url, rag={"strategy": "naive"}).chat(ASK, rag={"strategy": "full"}, documents=DOORS)
    assert answer.additional_kwargs["rag"]["strategy"] == "full"


def test_a_stream_ends_with_the_account(url: str) -> None:
    *_, last = made(url).stream_chat(ASK, documents=DOORS)
    assert list(chunks(last.additional_kwargs["rag"])) == ["North", "South"]


def test_it_answers_without_blocking(url: str) -> None:
    answer = asyncio.run(made(url).achat(ASK, documents=DOORS))
    assert list(chunks(answer.additional_kwargs["rag"])) == ["North", "South"]


def test_a_tool_is_called(url: str) -> None:
    llm = made(url, max_tokens=200, rag={"top_k": 0})
    program = FunctionCallingProgram.from_defaults(
        output_cls=Cat, prompt_template_str="A pet", llm=llm, tool_choice="required"
    )
    assert isinstance(program(), Cat)


def test_structured_output_is_an_instance(url: str) -> None:
    answer = made(url, max_tokens=200, rag={"top_k": 0}).as_structured_llm(Cat).chat(ASK)
    assert isinstance(answer.raw, Cat)


def test_a_title_of_the_metadata_is_sent_unless_it_is_null() -> None:
    about: list[dict[str, Any]] = [{"title": "North", "file_id": "north"}, {"title": 7}, {"title": None}, {}]
    sent = passages(TextNode(text="It is red.", metadata=metadata) for metadata in about)
    assert [passage["title"] for passage in sent] == ["North", "7", "", ""]


@pytest.mark.parametrize("given", [{}, {"api_base": "", "api_key": ""}])
def test_an_empty_address_or_key_counts_as_unset(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setenv("RAGJAX_BASE_URL", "")
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    monkeypatch.setenv("OPENAI_API_KEY", "never this")
    llm = Ragjax(model="tiny", **given)
    assert llm.api_base == "http://127.0.0.1:8000/v1" and llm.api_key == "none"
