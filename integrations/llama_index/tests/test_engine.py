"""The query engine and the retriever: nodes go as documents, and what was reused comes back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index_ragjax import Ragjax, RagjaxQueryEngine, RagjaxRetriever
from llama_index_ragjax.passage import passages

ASK = "Which door is red?"
FILES = ["north", "south"]


class Elsewhere(BaseNodePostprocessor):
    """Keeps the first node. It must not run in the thread of the event loop."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert threading.current_thread() is not threading.main_thread()
        return nodes[:1]


@pytest.fixture
def parts(url: str, search: Any) -> tuple[Ragjax, RagjaxRetriever]:
    return Ragjax(model="tiny", api_base=url, max_tokens=8), RagjaxRetriever("doors", base_url=search.url)


def sent(response: Any) -> list[str]:
    """Files whose passages stood in the prompt."""
    ids = [segment["id"] for segment in response.metadata["rag"]["segments"]]
    return [name.partition("-")[0] for name in ids if "#" in name]


def test_a_search_becomes_nodes(search: Any) -> None:
    retriever = RagjaxRetriever("doors", top_k=2, filters={"type": "eq"}, base_url=search.url, api_key="sk-one")
    first, second = retriever.retrieve(ASK)
    (asked,) = search.asked
    assert asked["query"] == ASK and asked["max_num_results"] == 2 and asked["filters"] == {"type": "eq"}
    assert asked["key"] == "Bearer sk-one"
    assert first.text == "The north door is red." and first.score == 0.75 and second.score == 0.5
    assert first.metadata == {"file_id": "north", "filename": "The north door", "page": 3, "floor": 2, "title": "North"}
    assert passages([first]) == [{"id": first.node_id, "text": "The north door is red.", "title": ""}]
    assert second.text == "The south door\nis blue."
    assert [node.node_id for node in asyncio.run(retriever.aretrieve(ASK))] == [first.node_id, second.node_id]


def test_an_empty_address_or_key_counts_as_unset(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGJAX_BASE_URL", "")
    monkeypatch.setenv("RAGJAX_API_KEY", "")
    monkeypatch.setattr("llama_index_ragjax.connection.URL", search.url)
    RagjaxRetriever("doors").retrieve(ASK)
    assert search.asked[0]["key"] == "Bearer none"


def test_a_refusal_is_an_error(search: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no such knowledge base"):
        RagjaxRetriever("windows", base_url=search.url).retrieve(ASK)


def test_an_answer_says_what_was_reused(parts: Any) -> None:
    response = RagjaxQueryEngine(*parts, system="Answer in a word.").query(ASK)
    assert isinstance(response, Response) and sent(response) == FILES
    assert [node.metadata["file_id"] for node in response.source_nodes] == FILES
    again = asyncio.run(RagjaxQueryEngine(*parts, system="Answer in a word.").aquery(ASK))
    assert again.response == response.response and again.metadata["rag"]["segments"][1]["reused"] > 0


def test_what_a_postprocessor_drops_is_not_sent(parts: Any) -> None:
    nearest = SimilarityPostprocessor(similarity_cutoff=0.6)
    assert sent(RagjaxQueryEngine(*parts, node_postprocessors=[nearest]).query(ASK)) == FILES[:1]


def test_a_postprocessor_does_not_block_an_event_loop(parts: Any) -> None:
    engine = RagjaxQueryEngine(*parts, node_postprocessors=[Elsewhere()])
    assert sent(asyncio.run(engine.aquery(ASK))) == FILES[:1]
    (node,) = asyncio.run(engine.aretrieve(QueryBundle(ASK)))
    assert node.metadata["file_id"] == "north"


def test_a_stream_has_the_account_at_its_end(parts: Any) -> None:
    whole = RagjaxQueryEngine(*parts).query(ASK)
    response = RagjaxQueryEngine(*parts, streaming=True).query(ASK)
    assert isinstance(response, StreamingResponse) and response.metadata == {}
    assert "".join(response.response_gen) == whole.response and sent(response) == FILES


def test_a_stream_has_the_account_at_its_end_without_blocking(parts: Any) -> None:
    async def run() -> tuple[str, list[str]]:
        response = await RagjaxQueryEngine(*parts, streaming=True).aquery(ASK)
        assert isinstance(response, AsyncStreamingResponse)
        text = "".join([text async for text in response.async_response_gen()])
        return text, sent(response)

    assert asyncio.run(run()) == (RagjaxQueryEngine(*parts).query(ASK).response, FILES)


def test_an_answer_over_what_it_finds_reuses_the_knowledge_base(url: str) -> None:
    retriever = RagjaxRetriever("doors", top_k=1, base_url=url)
    llm = Ragjax(model="tiny", api_base=url, max_tokens=2, rag={"strategy": "naive"})
    llm.chat([ChatMessage("north door", role="user")], rag={"knowledge": "doors", "top_k": 1})
    response = RagjaxQueryEngine(llm, retriever).query("north door")
    (chunk,) = [segment for segment in response.metadata["rag"]["segments"] if "#" in segment["id"]]
    assert sent(response) == ["north"] and chunk["reused"] == chunk["tokens"] > 0
