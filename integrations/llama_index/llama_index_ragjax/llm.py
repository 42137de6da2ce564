"""An LLM over a server: LlamaIndex's for OpenAI's API, with documents as documents and the account of reuse."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.llms.openai_like import OpenAILike

from llama_index_ragjax import connection
from llama_index_ragjax.passage import passages


class Ragjax(OpenAILike):  # type: ignore[misc]  # its base is not typed
    """An LLM that takes `documents` beside the messages, and says in `additional_kwargs["rag"]` what was reused.

        Ragjax(model="smollm2-135m-instruct").chat([ChatMessage("Who keeps the lighthouse?")], documents=nodes)

    A call takes `documents` (nodes, or ids of the server's knowledge base) and `rag`, further fields of the request's
    `rag`. Documents given so have KV of their own, which is reused at any place of any later prompt; of text
    inside a message, the strategy `moved` reuses most. Without documents the server may retrieve by itself.
    """

    is_chat_model: bool = True
    is_function_calling_model: bool = True
    should_use_structured_outputs: bool = True
    rag: dict[str, Any] | None = Field(default=None, description="Fields of `rag` for all calls.")

    def __init__(
        self,
        model: str,
        *,
        api_base: str | None = None,
        api_key: str | None = None,
        temperature: float = 0.0,
        **fields: Any,
    ) -> None:
        # Left out, these two would be OpenAI's: its address, and the key of OPENAI_API_KEY.
        where = {"api_base": api_base or connection.base_url(), "api_key": api_key or connection.api_key()}
        super().__init__(model=model, temperature=temperature, **where, **fields)

    @classmethod
    def class_name(cls) -> str:
        """The name by which LlamaIndex stores it."""
        return "Ragjax"

    def _get_model_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        documents, rag = kwargs.pop("documents", None), kwargs.pop("rag", None)
        body: dict[str, Any] = super()._get_model_kwargs(**kwargs)
        given = {} if documents is None else {"documents": passages(documents)}
        fields = {**(self.rag or {}), **(rag or {}), **given}
        if fields:
            body["extra_body"] = {**(body.get("extra_body") or {}), "rag": fields}
        return body

    def _get_response_token_counts(self, raw_response: Any) -> dict[str, Any]:
        # What every kind of call makes its `additional_kwargs` of; of a stream the last chunk has the account.
        counts: dict[str, Any] = super()._get_response_token_counts(raw_response)
        rag = getattr(raw_response, "rag", None)
        return counts if rag is None else {**counts, "rag": rag}
