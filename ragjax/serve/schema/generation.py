"""Fields that both completion endpoints share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ragjax import core
from ragjax.serve.schema.body import Body, Count, Name, Text


def _strings(stop: object) -> object:
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop) if isinstance(stop, list) else stop


TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class Generation(Body):
    """The fields that both completion endpoints share."""

    model: Name
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[tuple[Name, ...], BeforeValidator(_strings, json_schema_input_type=str | list[str])] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(fail_fast=True)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    user: Text | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> core.Sampling:
        if self.stream_options is not None and not self.stream:
            raise core.RequestError("stream_options needs stream: true", param="stream_options")
        names = {"temperature", "top_p", "top_k", "seed", "stop"}
        names |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
        given = self.model_dump(include=names, exclude_none=True)
        given["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        return core.Sampling(**given, logprobs=logprobs)
