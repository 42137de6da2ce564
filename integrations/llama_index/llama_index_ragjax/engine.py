"""A query engine that sends what a retriever found as documents, not as text inside of a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import ChatMessage, ChatResponse
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_ragjax.llm import Ragjax


class RagjaxQueryEngine(BaseQueryEngine):
    """Retrieves nodes, and has the server answer over them; `metadata["rag"]` of a response says what was reused.

    retriever: any of LlamaIndex. node_postprocessors: run over what it found, in order. streaming: whether `query`
    gives a `StreamingResponse` (`aquery` an `AsyncStreamingResponse`), whose `metadata["rag"]` is there at its end.
    system: the system message, if any.
    """

    def __init__(
        self,
        llm: Ragjax,
        retriever: BaseRetriever,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        streaming: bool = False,
        system: str | None = None,
    ) -> None:
        super().__init__(llm.callback_manager)
        self._llm = llm
        self._retriever = retriever
        self._postprocessors = tuple(node_postprocessors)
        self._streaming = streaming
        self._system = system

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The nodes that a question gets."""
        nodes = self._retriever.retrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The same without blocking."""
        nodes = await self._retriever.aretrieve(query_bundle)
        for postprocessor in self._postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """The answer over these nodes; additional ones are named as sources and not sent."""
        asked, sources = self._messages(query_bundle), [*nodes, *(additional_source_nodes or ())]
        if self._streaming:
            metadata: dict[str, Any] = {}
            texts = _texts(self._llm.stream_chat(asked, documents=nodes), metadata)
            return StreamingResponse(texts, source_nodes=sources, metadata=metadata)  # type: ignore[arg-type]
        return _response(self._llm.chat(asked, documents=nodes), sources)

    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """The same without blocking."""
        asked, sources = self._messages(query_bundle), [*nodes, *(additional_source_nodes or ())]
        if self._streaming:
            metadata: dict[str, Any] = {}
            texts = _atexts(await self._llm.astream_chat(asked, documents=nodes), metadata)
            return AsyncStreamingResponse(texts, source_nodes=sources, metadata=metadata)
        return _response(await self._llm.achat(asked, documents=nodes), sources)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return self.synthesize(query_bundle, self.retrieve(query_bundle))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        return await self.asynthesize(query_bundle, await self.aretrieve(query_bundle))

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}

    def _messages(self, query_bundle: QueryBundle) -> list[ChatMessage]:
        system = [] if self._system is None else [ChatMessage(self._system, role="system")]
        return [*system, ChatMessage(query_bundle.query_str, role="user")]


def _response(answer: ChatResponse, sources: list[NodeWithScore]) -> Response:
    return Response(answer.message.content, source_nodes=sources, metadata={"rag": answer.additional_kwargs.get("rag")})


def _texts(chunks: Iterator[ChatResponse], metadata: dict[str, Any]) -> Iterator[str]:
    for chunk in chunks:
        metadata |= _account(chunk)
        yield chunk.delta or ""


async def _atexts(chunks: Any, metadata: dict[str, Any]) -> AsyncGenerator[str, None]:
    async for chunk in chunks:
        metadata |= _account(chunk)
        yield chunk.delta or ""


def _account(chunk: ChatResponse) -> dict[str, Any]:
    return {"rag": chunk.additional_kwargs["rag"]} if "rag" in chunk.additional_kwargs else {}
