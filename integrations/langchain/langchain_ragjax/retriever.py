"""A retriever over the knowledge bases of a server, by `POST /v1/vector_stores/{name}/search`."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from langchain_ragjax import connection
from langchain_ragjax.passage import found


class RagjaxRetriever(BaseRetriever):
    """The chunks of a knowledge base that are nearest to a question, best first.

    Raises:
        openai.OpenAIError: what the server refuses, an unknown knowledge base for instance.
    """

    knowledge: str
    """Name of the knowledge base."""
    k: int = Field(default=3, ge=1, le=50)
    """Chunks to find, at most."""
    filters: dict[str, Any] | None = None
    """A filter over attributes, as OpenAI's API takes it: `{"type": "eq", "key": …, "value": …}`."""
    base_url: connection.BaseUrl = Field(default_factory=connection.base_url)
    api_key: connection.ApiKey = Field(default_factory=connection.api_key)
    timeout: float = Field(default=60.0, gt=0)
    """Seconds."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        with openai.OpenAI(**self._connection()) as client:
            return found(client.vector_stores.search(self.knowledge, **self._search(query)).data)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        async with openai.AsyncOpenAI(**self._connection()) as client:
            page = await client.vector_stores.search(self.knowledge, **self._search(query))
            return found(page.data)

    def _connection(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "api_key": self.api_key.get_secret_value(), "timeout": self.timeout}

    def _search(self, query: str) -> dict[str, Any]:
        filters = {} if self.filters is None else {"filters": self.filters}
        return {"query": query, "max_num_results": self.k, **filters}
