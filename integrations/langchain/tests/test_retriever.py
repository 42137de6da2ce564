"""The retriever: what it asks for, and what it makes of the results."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
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
    assert first.metadata == {"file_id": "north", "filename": "The north door", "score": 0.75, "floor": 2}
    assert second.page_content == "The south door\nis blue." and first.id != second.id
    assert asyncio.run(retriever.ainvoke("Which door?")) == [first, second]


def test_what_it_finds_can_be_sent_as_it_is(search: Any) -> None:
    documents = RagjaxRetriever(knowledge="doors", base_url=search.url).invoke("Which door?")
    assert "filters" not in search.asked[0]
    first, second = passages([documents[0], "an id"])
    assert first == {"id": documents[0].id, "text": "The north door is red.", "title": ""} and second == "an id"


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
