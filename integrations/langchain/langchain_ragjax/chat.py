"""A chat model over a server: LangChain's model for OpenAI, with documents as documents and the account of reuse."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_openai import ChatOpenAI
from pydantic import Field

from langchain_ragjax import connection
from langchain_ragjax.passage import passages


class ChatRagjax(ChatOpenAI):
    """A chat model that takes `documents` beside the messages, and says in `response_metadata["rag"]` what was reused.

        ChatRagjax(model="smollm2-135m-instruct").invoke("Who keeps the lighthouse?", documents=documents)

    A call takes `documents` (LangChain's, or ids of the server's knowledge base) and `rag`, further fields of the
    request's `rag`. Documents given so have KV of their own, which is reused at any place of any later prompt; of
    text inside a message, the strategy `moved` reuses most. Without documents the server may retrieve by itself.

    Streams, tools (`bind_tools`) and structured output (`with_structured_output`) are those of `ChatOpenAI`.
    """

    openai_api_base: connection.BaseUrl = Field(default_factory=connection.base_url, alias="base_url")
    openai_api_key: connection.ApiKey = Field(default_factory=connection.api_key, alias="api_key")
    stream_usage: bool | None = True
    use_responses_api: bool | None = False
    rag: dict[str, Any] | None = None
    """Fields of `rag` for all calls; a call's own come before them."""

    @property
    def _llm_type(self) -> str:
        return "chat-ragjax"

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Where the key comes from."""
        return {"openai_api_key": "RAGJAX_API_KEY"}

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        documents, rag = kwargs.pop("documents", None), kwargs.pop("rag", None)
        payload: dict[str, Any] = super()._get_request_payload(input_, stop=stop, **kwargs)
        given = {} if documents is None else {"documents": passages(documents)}
        fields = {**(self.rag or {}), **(rag or {}), **given}
        if fields:
            payload["extra_body"] = {**(payload.get("extra_body") or {}), "rag": fields}
        return payload

    def _create_chat_result(
        self, response: dict[str, Any] | openai.BaseModel, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        whole = response if isinstance(response, dict) else response.model_dump(include={"rag", "choices"})
        for generation, choice in zip(result.generations, whole["choices"], strict=True):
            _tell(generation.message, choice.get("rag") or whole.get("rag"))
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], default_chunk_class: type, base_generation_info: dict[str, Any] | None
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, default_chunk_class, base_generation_info)
        if made is not None:
            _tell(made.message, chunk.get("rag") or chunk.get("chunk", {}).get("rag"))
        return made


def _tell(message: BaseMessage, rag: dict[str, Any] | None) -> None:
    """Put the account of reuse where LangChain's callers look for it."""
    message.response_metadata["model_provider"] = "ragjax"  # of every chunk: LangChain joins texts that differ
    if rag is not None:
        message.response_metadata["rag"] = rag
