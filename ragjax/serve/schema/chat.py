"""The body of a chat completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, Field

from ragjax import core
from ragjax.serve.choices import choices
from ragjax.serve.schema.body import Count
from ragjax.serve.schema.format import ResponseFormat
from ragjax.serve.schema.generation import Generation
from ragjax.serve.schema.message import ChatMessage
from ragjax.serve.schema.rag import ChatRag
from ragjax.serve.schema.tool import ChatTool, ToolChoice, tools_of, typed


class ChatBody(Generation):
    """Body of POST /v1/chat/completions. `rag: null` turns retrieval off."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(typed, json_schema_input_type=str | ToolChoice)] | None = None
    rag: ChatRag | None = Field(default_factory=ChatRag)

    def to_core(self) -> tuple[core.Request, ...]:
        """What the body asks of the engine, a request for each choice.

        Raises:
            core.RequestError: for fields that contradict each other.
        """
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise core.RequestError("set max_completion_tokens or max_tokens, not both", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise core.RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(self.max_tokens or self.max_completion_tokens, alternatives)
        schema = None if self.response_format is None else self.response_format.to_core()
        request = core.Request(
            messages=tuple(message.to_core() for message in self.messages),
            sampling=replace(sampling, json_schema=schema),
            rag=None if self.rag is None else self.rag.to_core(),
            tools=tools_of([tool.to_core() for tool in self.tools or ()], self.tool_choice),
        )
        return choices([request], self.n or 1)
