"""The retriever: what it asks for, and what it makes of the results."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from langchain_core.documents import Document
from langchain_ragjax import ChatRagjax, RagjaxRetriever
from langchain_ragjax.passage import passages

FILTER = {"type": "eq", "key": "floor", "value": 2}


def test_a_search_becomes_documents(search: Any) -> None:
    retriever = RagjaxRetriever(knowledge="doors", k=2, filters=FILTER, base_url=search.url, api_key="sk-one")
    first, second = retriever.invoke("Which door?")
    (asked,) = search.asked
    assert asked["query"] == "Which door?" and asked["max_num_results"] == 2 and asked["filters"] == FILTER
    assert asked["path"].endswith("/doors/search") and asked["key"] == "Bearer sk-one"
    assert first.page_content == "The north door is red."
    about = {"file_id": "north", "filename": "The north door", "page": 3, "score": 0.75, "passage_id": first.id}
    assert first.metadata == {**about, "floor": 2, "title": "North"}
    assert second.page_content == "The south door\nis blue." and first.id != second.id
    assert asyncio.run(retriever.ainvoke("Which door?")) == [first, second]


def test_what_it_finds_can_be_sent_as_it_is(search: Any) -> None:
    documents = RagjaxRetriever(knowledge="doors", base_url=search.url).invoke("Which door?")
    assert "filters" not in search.asked[0]
    first, second = passages([documents[0], "an id"])
    assert first == {"id": documents[0].id, "text": "The north door is red.", "title": ""} and second == "an id"
    reranked = Document(documents[0].page_content, metadata=documents[0].metadata)
    assert passages([reranked])[0]["title"] == ""


def test_a_title_of_the_metadata_is_sent_unless_it_is_null() -> None:
    about = [{"title": "North", "file_id": "north"}, {"title": 7}, {"title": None}, {}]
    sent = passages(Document("It is red.", metadata=metadata) for metadata in about)
    assert [passage["title"] for passage in sent] == ["North", "7", "", ""]


@pytest.mark.parametrize("given", [{}, {"base_url": "", "api_key": ""}, {"base_url": None, "api_key": None}])
def test_an_empty_address_or_key_counts_as_unset(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    monkeypatch.setenv("RAGJAX_BASE_URL", "")
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    monkeypatch.setenv("OPENAI_API_KEY", "never this")
    retriever = RagjaxRetriever(knowledge="doors", **given)
    assert retriever.base_url == "http://127.0.0.1:8000/v1" and retriever.api_key.get_secret_value() == "none"


def test_a_refusal_is_an_error(search: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no such knowledge base"):
        RagjaxRetriever(knowledge="windows", base_url=search.url).invoke("Which door?")


def test_an_answer_over_what_it_finds_reuses_the_knowledge_base(url: str) -> None:
    (document,) = RagjaxRetriever(knowledge="doors", k=1, base_url=url).invoke("north door")
    chat = ChatRagjax(model="tiny", base_url=url, max_tokens=2, rag={"strategy": "naive"})
    chat.invoke("north door", rag={"knowledge": "doors", "top_k": 1})
    answer = chat.invoke("Which door is red?", documents=[document])
    (chunk,) = [segment for segment in answer.response_metadata["rag"]["segments"] if "#" in segment["id"]]
    assert document.metadata["file_id"] == "north" and chunk["reused"] == chunk["tokens"] > 0
