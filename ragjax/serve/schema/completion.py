"""The body of a text completion."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.choices import choices
from ragjax.serve.schema.body import Filled, One
from ragjax.serve.schema.generation import Generation
from ragjax.serve.schema.rag import TextRag


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


def _prompts(prompt: object) -> object:
    """A list of prompts, each a text or token ids, from any of OpenAI's four forms."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    return prompt


def _prompt_kind(prompt: object) -> str:
    return "<tokens>" if isinstance(prompt, list) else "<text>"


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[Annotated[Filled, Tag("<text>")] | Annotated[TokenIds, Tag("<tokens>")], Discriminator(_prompt_kind)]


class CompletionBody(Generation):
    """Body of POST /v1/completions: raw text, no chat template and no retrieval."""

    prompt: Annotated[
        list[Prompt],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[bool, AfterValidator(_only_false)] | None = None
    best_of: One | None = None
    rag: TextRag | None = None

    def to_core(self) -> tuple[core.Request, ...]:
        """What the body asks of the engine, a request for each choice; raises as in chat."""
        asked = self.rag or TextRag()
        rag = core.Rag(
            top_k=0,
            strategy=asked.strategy,
            recompute_ratio=asked.recompute_ratio,
            compression=asked.compressed(),
            detail=bool(asked.detail),
            recognise=asked.recognise,
        )
        sampling = self._sampling(self.max_tokens, self.logprobs)
        prompts = (prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt)
        return choices([core.Request(prompt=prompt, sampling=sampling, rag=rag) for prompt in prompts], self.n or 1)
