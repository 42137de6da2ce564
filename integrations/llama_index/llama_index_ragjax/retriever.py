"""A retriever over the knowledge bases of a server, by `POST /v1/vector_stores/{name}/search`."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_ragjax import connection
from llama_index_ragjax.passage import found


class RagjaxRetriever(BaseRetriever):
    """The chunks of a knowledge base that are nearest to a question, best first.

    knowledge: name of the knowledge base. top_k: chunks to find, 1 to 50. filters: over attributes, as OpenAI's API
    takes them. base_url, api_key: of the server (None: `RAGJAX_BASE_URL`, `RAGJAX_API_KEY`). timeout: seconds.

    Raises:
        openai.OpenAIError: what the server refuses, an unknown knowledge base for instance.
    """

    def __init__(
        self,
        knowledge: str,
        *,
        top_k: int = 3,
        filters: dict[str, Any] | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        self._knowledge = knowledge
        self._asked: dict[str, Any] = {"max_num_results": top_k} | ({} if filters is None else {"filters": filters})
        self._connection: dict[str, Any] = {
            "base_url": base_url or connection.base_url(),
            "api_key": api_key or connection.api_key(),
            "timeout": timeout,
        }

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with openai.OpenAI(**self._connection) as client:
            page = client.vector_stores.search(self._knowledge, query=query_bundle.query_str, **self._asked)
            return found(page.data)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        async with openai.AsyncOpenAI(**self._connection) as client:
            page = await client.vector_stores.search(self._knowledge, query=query_bundle.query_str, **self._asked)
            return found(page.data)
