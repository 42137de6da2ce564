"""Bodies of requests, in the form of OpenAI's API reference, and what they ask of the engine.

A body is strict: an unknown field or a value of another type is an error, and null counts as absent: each field that
may be left out takes it. `rag: null` alone says more. Unless the server is strict too, `neutral.py` takes out before
what changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ragjax import core
from ragjax.serve.choices import choices

NAME_CHARS = 1024
"""Characters of a name or stop string: every chunk of a document has its id and title."""


def _only_false(value: bool) -> bool:
    if value:
        raise ValueError("only false is supported")
    return value


def _parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _strings(stop: object) -> object:
    if isinstance(stop, str):
        return (stop,)
    return tuple(stop) if isinstance(stop, list) else stop


def _prompts(prompt: object) -> object:
    """A list of prompts, each a text or token ids, from any of OpenAI's four forms."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    return prompt


def _no_refusal(refusal: object) -> object:
    if refusal is not None:
        raise ValueError("send what was said as content")
    return refusal


def _prompt_kind(prompt: object) -> str:
    return "tokens" if isinstance(prompt, list) else "text"


# With a length to check, pydantic refuses half of a surrogate pair: JSON can spell it, and no tokenizer takes it.
Text = Annotated[str, Field(min_length=0)]
Filled = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=0, max_length=NAME_CHARS)]
FilledName = Annotated[str, Field(min_length=1, max_length=NAME_CHARS)]
Count = Annotated[int, Field(ge=1)]
# Literal[1] would take true and 1.0, which are values of another type.
One = Annotated[int, Field(ge=1, le=1)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Prompt = Annotated[Annotated[Filled, Tag("text")] | Annotated[TokenIds, Tag("tokens")], Discriminator(_prompt_kind)]


class Body(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def names(cls) -> set[str]:
        """What its fields are called in JSON."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: object) -> object:
        """Of unknown fields the first alone: pydantic would make an error of each."""
        names = cls.names()
        if not isinstance(given, dict) or len(given) <= len(names):
            return given
        unknown = next(name for name in given if name not in names)
        return {name: given[name] for name in (*names, unknown) if name in given}


class TextPart(Body):
    """One text part of a message; images, audio and files are refused."""

    type: Literal["text"]
    text: Text


class CalledFunction(Body):
    """What was called: the name of a function, and its arguments as JSON text."""

    name: FunctionName
    arguments: Text


class CalledTool(Body):
    """A call that the assistant made."""

    id: FilledName
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Body):
    """One message. `developer` is OpenAI's newer name of `system`; `refusal` comes back null with our own answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True)] | None,
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    refusal: Annotated[None, BeforeValidator(_no_refusal)] = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    @field_validator("content")
    @classmethod
    def _said(cls, content: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("only an assistant's message may have no content; give a text")
        return content

    def to_core(self) -> core.Message:
        """The message, its parts as lines."""
        role = "system" if self.role == "developer" else self.role
        calls = [core.ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        text = "\n".join(part.text for part in self.content or ())
        return core.Message(role, text, tuple(calls), self.tool_call_id)


class InlineDocument(Body):
    """A passage given with the request."""

    id: FilledName
    text: Filled
    title: Name | None = None


Passage = Annotated[
    Annotated[Name, Tag("id")] | Annotated[InlineDocument, Tag("document")],
    Discriminator(lambda value: "id" if isinstance(value, str) else "document"),
]


class _Compression(BaseModel):
    """A compression in either form; its values are checked by `core.Compression`."""

    short: Name | None = None
    given: dict[str, Any] | None = None

    def to_core(self) -> core.Compression | Literal["none"]:
        if self.short == "none":
            return "none"
        if self.given is not None:
            return core.Compression.of(self.given)
        try:
            return core.Compression.parse(self.short or "")
        except core.ConfigError as error:
            raise core.RequestError(str(error), param="rag.compression", code="invalid_value") from None


def _short(compression: object) -> object:
    if isinstance(compression, str):
        return {"short": compression}
    return {"given": compression} if isinstance(compression, dict) else compression


class TextRag(Body):
    """How to reuse KV where nothing is retrieved.

    compression: which of the prompt's tokens the answer sees: "snapkv+graph:512", the same as an object, or "none".
    detail: whether the account of each segment names its tokens.
    """

    strategy: Name | None = None
    recompute_ratio: float | None = None
    compression: (
        Annotated[_Compression, BeforeValidator(_short, json_schema_input_type=str | dict[str, Any])] | None
    ) = None
    detail: bool | None = None

    def compressed(self) -> core.Compression | Literal["none"] | None:
        """Which of the prompt's tokens the answer sees.

        Raises:
            core.RequestError: for a compression that cannot be.
        """
        return None if self.compression is None else self.compression.to_core()


class GraphRag(Body):
    """Which facts to use. relation_paths: entity, relation, entity, … of each, used instead of retrieval."""

    name: Name | None = None
    entities: Annotated[list[FilledName], Field(fail_fast=True)] | None = None
    relation_paths: Annotated[list[Annotated[list[Filled], Field(fail_fast=True)]], Field(fail_fast=True)] | None = None
    hops: Count | None = None
    paths: Count | None = None
    serialization: Literal["path", "triplet"] | None = None

    def to_core(self) -> core.Graph:
        """The same for the engine."""
        given = None if self.relation_paths is None else tuple(map(tuple, self.relation_paths))
        entities = None if self.entities is None else tuple(self.entities)
        return core.Graph(self.name, entities, given, self.hops, self.paths, self.serialization or "path")


class Quality(Body):
    """How far the answer may be from full attention's. kl: nats a token, above 0."""

    kl: float


def _named(graph: object) -> object:
    return {"name": graph} if isinstance(graph, str) else graph


class ChatRag(TextRag):
    """What knowledge to use, too.

    documents: passages used instead of retrieval: ids of the knowledge base, or whole documents. graph: facts of a
    knowledge graph, by its name or in detail. quality: a budget, which picks the recompute ratio of this request.
    """

    knowledge: Name | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    documents: Annotated[list[Passage], Field(fail_fast=True)] | None = None
    keep_top: Annotated[int, Field(ge=0)] | None = None
    quality: Quality | None = None
    graph: Annotated[GraphRag, BeforeValidator(_named, json_schema_input_type=str | GraphRag)] | None = None

    def to_core(self) -> core.Rag:
        """The same for the engine."""
        documents = None if self.documents is None else tuple(_passage(document) for document in self.documents)
        graph = None if self.graph is None else self.graph.to_core()
        return core.Rag(
            self.knowledge,
            self.top_k,
            self.strategy,
            documents,
            self.recompute_ratio,
            graph,
            self.keep_top,
            self.compressed(),
            None if self.quality is None else self.quality.kl,
            bool(self.detail),
        )


def _passage(document: str | InlineDocument) -> str | core.Document:
    return document if isinstance(document, str) else core.Document(document.id, document.text, document.title or "")


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class JsonSchema(Body):
    """The JSON Schema of an answer; it is followed, whatever `strict` says. Its name changes nothing."""

    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """How an answer is written: as text, as a JSON object, or as an instance of a JSON Schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def to_core(self) -> str | None:
        """The JSON Schema of the answer, as JSON text; None: it is text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return '{"type": "object"}'
        if self.json_schema is None or self.json_schema.schema_ is None:
            reason = 'response_format of type json_schema needs json_schema: {"name": …, "schema": {…}}'
            raise core.RequestError(reason, param="response_format.json_schema", code="missing_required_parameter")
        return _as_json(self.json_schema.schema_, "response_format.json_schema.schema")


class FunctionTool(Body):
    """A function that an answer may call. parameters: JSON Schema of its arguments; it is followed in any case."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionTool

    def to_core(self) -> core.Tool:
        """The same for the engine."""
        given = self.function
        schema = given.parameters or {"properties": {}, "additionalProperties": False}
        schema = {"type": "object", **schema}
        if schema["type"] != "object":
            reason = f"the parameters of the tool {given.name} must be an object"
            raise core.RequestError(reason, param="tools", code="invalid_value")
        return core.Tool(given.name, given.description or "", _as_json(schema, "tools"))


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class ToolChoice(Body):
    """Whether a tool is called: as the model likes, never, in any case, or this one."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None


def _as_json(value: object, param: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise core.RequestError(f"{param} is nested too deeply", param=param, code="invalid_schema") from None


def _typed(choice: object) -> object:
    return {"type": choice} if isinstance(choice, str) else choice


class _Generation(Body):
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


class ChatBody(_Generation):
    """Body of POST /v1/chat/completions. `rag: null` turns retrieval off."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_typed, json_schema_input_type=str | ToolChoice)] | None = None
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
            tools=self._tools(),
        )
        return choices([request], self.n or 1)

    def _tools(self) -> core.Tools | None:
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = tuple(tool.to_core() for tool in self.tools or ())
        named = None if choice.type != "function" or choice.function is None else choice.function.name
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise core.RequestError("two tools have the same name", param="tools", code="invalid_value")
        if choice.type == "function" and named not in names:
            known = ", ".join(names) or "none"
            reason = f"tool_choice must name one of the tools: {known}"
            raise core.RequestError(reason, param="tool_choice", code="invalid_value")
        if choice.type == "required" and not tools:
            reason = "tool_choice is required, and there are no tools"
            raise core.RequestError(reason, param="tool_choice", code="invalid_value")
        if choice.type == "none" or not tools:
            return None
        return core.Tools(tools, choice.type != "auto", named)


class CompletionBody(_Generation):
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
        )
        sampling = self._sampling(self.max_tokens, self.logprobs)
        prompts = (prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt)
        return choices([core.Request(prompt=prompt, sampling=sampling, rag=rag) for prompt in prompts], self.n or 1)
