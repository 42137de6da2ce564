"""Bodies of chat and text completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator

from ragjax import core
from ragjax.serve.schema import body
from ragjax.serve.schema.body import MOST_ENTRIES, TEXT_ONLY, TOO_LONG, Body, Many, Refusal, RefusingBody, Text, at_most
from ragjax.serve.schema.rag import ChatRag, TextRag

if TYPE_CHECKING:
    from ragjax.serve.schema.response import InputPart, ResponseChoice

NO_EFFECT = frozenset(
    {
        *("metadata", "store", "service_tier", "user", "reasoning_effort", "verbosity"),
        *("prompt_cache_key", "safety_identifier", "prediction"),
    }
)
"""Fields of OpenAI's API that have no effect here, whatever they say."""
_GRAMMAR = Refusal("use response_format with a json_schema instead")
_SAMPLING = Refusal("use temperature, top_p and top_k instead", (0, 0.0, False))
_CHAT = Refusal("use /v1/chat/completions", ([],))
REFUSED: Mapping[str, Refusal] = {
    "functions": Refusal("use tools instead", ([],)),
    "function_call": Refusal("use tool_choice instead", ("none", "auto")),
    "web_search_options": Refusal("this server searches its own knowledge bases: use rag.knowledge instead"),
    "audio": Refusal(TEXT_ONLY),
    "modalities": Refusal('only ["text"] is answered', ([], ["text"])),
    "suffix": Refusal("text is continued at its end only: leave it out", ("",)),
    "min_p": Refusal("use top_p or top_k instead", (0, 0.0)),
    "min_tokens": Refusal("use logit_bias on the end of text instead", (0,)),
    "ignore_eos": Refusal("use logit_bias on the end of text instead", (False,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _GRAMMAR),
    **dict.fromkeys(("json_schema", "grammar", "format", "structured_outputs"), _GRAMMAR),
    **dict.fromkeys(("typical_p", "mirostat", "xtc_probability", "dry_multiplier", "use_beam_search"), _SAMPLING),
    "stop_token_ids": Refusal("use stop with the tokens' texts instead", ([],)),
    "bad_words": Refusal("use logit_bias instead", ([],)),
    "truncate_prompt_tokens": Refusal("send what fits the context"),
    "prompt_logprobs": Refusal("log-probabilities are of the answer: use logprobs", (0,)),
    "include_stop_str_in_output": Refusal("an answer ends before its stop string", (False,)),
    "skip_special_tokens": Refusal("control tokens are no part of a text", (True,)),
    "chat_template": Refusal("chats are written with the model's own template, which takes chat_template_kwargs"),
}
"""Fields that would change the answer and cannot be had."""
Retention = Literal["in_memory", "in-memory", "24h"]
KEEP_S: Mapping[str, float] = {"24h": 86_400.0, "5m": 300.0, "30m": 1800.0, "1h": 3600.0}
"""Seconds for which a prompt is kept, by what clients call them."""
MOST_BREAKPOINTS = 4
"""Breakpoints of a prompt, at most, as in the APIs of others."""
MOST_BIASES = 2**10
"""Entries of logit_bias, at most; OpenAI's clients send at most 300."""
MOST_CALLS = 2**12
"""Calls of tools in all messages, at most: each takes about 50 microseconds to validate. With their answers, so many
fill a context of 120,000 tokens."""
FEW_TOOLS = at_most(128, "tools", "Send fewer tools", field="tools")


class CacheBreakpoint(Body):
    """A mark: what stands before it is kept."""

    mode: Literal["explicit"]


class CacheOptions(Body):
    """Keeping of a prompt. Prompts are matched at any token, so an implicit breakpoint has no effect."""

    no_effect = frozenset({"mode"})

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class TextPart(Body):
    """One text part of a message; images, audio and files are refused."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: CacheBreakpoint | None = None


def breakpoints_of(
    contents: Mapping[int, Sequence[TextPart | InputPart]], retention: str | None
) -> tuple[core.Breakpoint, ...]:
    """The breakpoints in the parts of messages, or the one behind the prompt if it is to be kept.

    contents: parts by the number of their message, which joins them by line breaks. retention: of the whole request.
    """
    found = []
    for number, parts in contents.items():
        size = -1
        for part in parts:
            size += 1 + len(part.text)
            if part.prompt_cache_breakpoint is not None:
                found.append(core.Breakpoint(KEEP_S.get(retention or "", KEEP_S["30m"]), number, size))
    if found:
        return tuple(found[-MOST_BREAKPOINTS:])
    seconds = KEEP_S.get(retention or "", 0.0)
    return (core.Breakpoint(seconds),) if seconds else ()


def joined(parts: Sequence[TextPart | InputPart] | None) -> str:
    return "\n".join(part.text for part in parts or ())


class CalledFunction(Body):
    """A called function. arguments: JSON text."""

    name: body.FunctionName
    arguments: Text


class CalledTool(Body):
    id: body.FilledName
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(RefusingBody):
    """One message. `developer` is OpenAI's newer name of `system`; `refusal` comes back null with our own answers."""

    no_effect = frozenset({"name", "annotations"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "audio": Refusal(TEXT_ONLY),
        "function_call": Refusal("use tool_calls instead"),
    }
    path = "messages."

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Many[TextPart] | None, body.texts_as("text", str | list[TextPart] | None)] = None
    refusal: None = None
    tool_calls: Many[CalledTool] | None = None
    tool_call_id: body.Name | None = None

    def in_vain(self) -> Iterator[str]:
        return iter(["tool_calls"] if self.tool_calls == [] else [])

    @field_validator("content")
    @classmethod
    def _said(cls, content: list[TextPart] | None, info: ValidationInfo) -> list[TextPart] | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("only an assistant's message may have no content; give a text")
        return content

    def to_core(self) -> core.Message:
        role = "system" if self.role == "developer" else self.role
        calls = [core.ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()]
        return core.Message(role, joined(self.content), tuple(calls), self.tool_call_id)


class FunctionTool(Body):
    """A function that an answer may call. parameters: JSON Schema of its arguments.

    strict: it is an error if no grammar holds all that the schema says.
    """

    name: body.FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_core(self) -> core.Tool:
        return tool_of(self.name, self.description, self.parameters, self.strict)


def tool_of(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> core.Tool:
    schema = {"type": "object", **(parameters or {"properties": {}, "additionalProperties": False})}
    if schema["type"] != "object":
        raise core.invalid("tools", f"the parameters of the tool {name} must be an object")
    return core.Tool(name, description or "", body.as_json(schema, "tools"), bool(strict))


class ChatTool(Body):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    name: body.FunctionName


class ToolChoice(Body):
    """Choice of a tool: as the model likes, never, in any case, or one by name."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None


def typed(choice: object) -> object:
    """A choice as an object: OpenAI's short form is its type alone."""
    return {"type": choice} if isinstance(choice, str) else choice


def idle_tools(tools: Sequence[Body] | None, choice: ToolChoice | ResponseChoice | None) -> Iterator[str]:
    """Names the fields that ask for no tools."""
    if tools is not None and not tools:
        yield "tools"
    if choice is not None and not tools and choice.type in ("none", "auto"):
        yield "tool_choice"


def tools_of(
    tools: Sequence[core.Tool], kind: str = "auto", named: str | None = None, parallel: bool | None = None
) -> core.Tools | None:
    """The tools that an answer may call, only once if `parallel` is false; None: it calls none.

    kind: type of the choice. named: the function of one by name.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise core.invalid("tools", "two tools have the same name")
    if kind == "function" and named not in names:
        raise core.invalid("tool_choice", f"tool_choice must name one of the tools: {', '.join(names) or 'none'}")
    if kind == "required" and not tools:
        raise core.invalid("tool_choice", "tool_choice is required, and there are no tools")
    if kind == "none" or not tools:
        return None
    return core.Tools(tuple(tools), kind != "auto", named, parallel is not False)


def schema_text(kind: str, schema: dict[str, Any] | None, param: str, needs: str) -> str | None:
    """The JSON Schema of an answer of some kind, as JSON text; None: it is text. needs: said if there is none."""
    if kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if schema is None:
        raise core.RequestError(needs, param=param, code="missing_required_parameter")
    return body.as_json(schema, f"{param.removesuffix('.schema')}.schema")


class JsonSchema(Body):
    """The JSON Schema of an answer, strict as that of a tool. Its name changes nothing."""

    name: body.Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Form of an answer: text, a JSON object (of a schema, if there is one), or an instance of a JSON Schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def to_core(self) -> str | None:
        """The JSON Schema of the answer, as JSON text; None: it is text."""
        if self.type != "json_schema":
            body.refuse_beside(self.type, "response_format", json_schema=self.json_schema)
        if self.type != "json_object":
            body.refuse_beside(self.type, "response_format", schema=self.schema_)
        elif self.schema_ is not None:
            return body.as_json(self.schema_, "response_format.schema")
        schema = None if self.json_schema is None else self.json_schema.schema_
        needs = 'response_format of type json_schema needs json_schema: {"name": …, "schema": {…}}'
        return schema_text(self.type, schema, "response_format.json_schema", needs)


def _strings(stop: object) -> object:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return tuple(stop) if isinstance(stop, list) else stop


Stops = Annotated[
    tuple[body.Name, ...],
    BeforeValidator(_strings, json_schema_input_type=str | list[str]),
    at_most(4, "strings", "Send fewer stop strings", field="stop"),
]
UnlessOff = BeforeValidator(lambda value: None if type(value) is int and value == -1 else value)
"""-1 says that there is no such value."""
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[
    dict[TokenId, float],
    Field(fail_fast=True),
    at_most(MOST_BIASES, "entries", "Name fewer tokens", field="logit_bias"),
]
Alternatives = Annotated[int, Field(ge=0, le=20)]


class StreamOptions(Body):
    no_effect = frozenset({"include_obfuscation"})

    include_usage: bool | None = None
    include_sources: bool | None = None


class GenerationBody(RefusingBody):
    """The fields that both completion endpoints share."""

    no_effect = NO_EFFECT
    refused = REFUSED

    model: body.Name
    max_tokens: body.Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, UnlessOff] = None
    n: body.Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**63)] | None, UnlessOff] = None
    logit_bias: Biases | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    user: Text | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def include_sources(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_sources)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> core.Sampling:
        if self.stream_options is not None and not self.stream:
            raise core.RequestError("stream_options needs stream: true", param="stream_options")
        names = {"temperature", "top_p", "top_k", "seed", "stop"}
        names |= {"presence_penalty", "frequency_penalty", "repetition_penalty"}
        given = self.model_dump(include=names, exclude_none=True)
        given["logit_bias"] = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        given["max_tokens"] = max_tokens
        if self.top_p == 0:  # the likeliest token alone
            given |= {"top_p": 1.0, "top_k": 1}
        return core.Sampling(**given, logprobs=logprobs)


MOST_CHOICES = 64
"""Choices of one body, at most: prompts times `n`."""


def choices(requests: Sequence[core.Request], n: int) -> tuple[core.Request, ...]:
    """`n` requests of each, those of one behind another. The i-th of them has the seed plus i, if a seed is given."""
    if len(requests) * n > MOST_CHOICES:
        asked = f"{len(requests)} prompts with {n} choices each were asked for"
        raise core.invalid("n" if n > 1 else "prompt", f"{asked}; at most {MOST_CHOICES} choices are made. Send fewer")

    def seeded(request: core.Request, number: int) -> core.Request:
        seed = request.sampling.seed
        if seed is None:
            return request
        return replace(request, sampling=replace(request.sampling, seed=(seed + number) % 2**63))

    return tuple(seeded(request, i) for request in requests for i in range(n))


FEW_MESSAGES = at_most(MOST_ENTRIES, "messages", "Send fewer messages", field="messages", code=TOO_LONG)
FEW_CALLS = at_most(
    MOST_CALLS,
    "calls in all messages",
    "Leave out earlier calls and their answers",
    field="messages[].tool_calls",
    within=["tool_calls"],
)


def few_parts(parts: str, joined: str) -> BeforeValidator:
    told, advice, field = f"{parts} in all messages", f"Join {joined}", "messages[].content"
    return at_most(MOST_ENTRIES, told, advice, field=field, within=["content"], code=TOO_LONG)


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions. `rag: null` turns retrieval off."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED,
        "prompt": Refusal("use messages, or /v1/completions"),
        "echo": Refusal("an answer has its own text alone", (False,)),
    }

    messages: Annotated[
        Many[ChatMessage], Field(min_length=1), FEW_CALLS, few_parts("text parts", "parts"), FEW_MESSAGES
    ]
    max_completion_tokens: body.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Many[ChatTool], FEW_TOOLS] | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[body.FunctionName, bool], Field(max_length=16)] | None = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(typed, json_schema_input_type=str | ToolChoice)] | None = None
    rag: ChatRag | None = Field(default_factory=ChatRag)

    def in_vain(self) -> Iterator[str]:
        return chain(super().in_vain(), idle_tools(self.tools, self.tool_choice))

    def to_core(self) -> tuple[core.Request, ...]:
        """Makes a request for each choice."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise core.RequestError("set max_completion_tokens or max_tokens, not both", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise core.RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(self.max_tokens or self.max_completion_tokens, alternatives)
        continued = self.messages[-1].role == "assistant"
        asked = {"continue_final_message": continued, "add_generation_prompt": not continued}
        for name, value in asked.items():
            if getattr(self, name) not in (None, value):
                reason = f"{name} is {json.dumps(value)} here: a last message of the assistant's is continued, no other"
                raise core.invalid(name, reason)
        form, choice = self.response_format, self.tool_choice or ToolChoice(type="auto")
        schema = None if form is None else form.to_core()
        strict = form is not None and form.json_schema is not None and bool(form.json_schema.strict)
        if choice.type != "function":
            body.refuse_beside(choice.type, "tool_choice", function=choice.function)
        named = None if choice.function is None else choice.function.name
        tools = [tool.function.to_core() for tool in self.tools or ()]
        said = {i: message.content for i, message in enumerate(self.messages) if message.content}
        request = core.Request(
            messages=tuple(message.to_core() for message in self.messages),
            sampling=replace(sampling, json_schema=schema, strict=strict),
            rag=None if self.rag is None else self.rag.to_core(),
            tools=tools_of(tools, choice.type, named, self.parallel_tool_calls),
            template=self.chat_template_kwargs or {},
            breakpoints=breakpoints_of(said, self.prompt_cache_retention),
        )
        return choices([request], self.n or 1)


def _several(given: object) -> object:
    """A list of texts or of token ids, from any of OpenAI's four forms."""
    one = isinstance(given, str) or (isinstance(given, list) and bool(given) and type(given[0]) is int)
    return [given] if one else given


SEVERAL = BeforeValidator(_several, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[body.Filled, Tag("<text>")] | Annotated[TokenIds, Tag("<tokens>")],
    Discriminator(lambda prompt: "<tokens>" if isinstance(prompt, list) else "<text>"),
]


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions: raw text, no chat template and no retrieval."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **REFUSED,
        **dict.fromkeys(("messages", "tools", "tool_choice", "response_format"), _CHAT),
    }

    prompt: Annotated[
        list[Prompt],
        Field(min_length=1, fail_fast=True),
        at_most(MOST_CHOICES, "prompts", "Send fewer prompts", field="prompt"),
        SEVERAL,
    ]
    logprobs: Alternatives | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: body.One | None = None
    rag: TextRag | None = None

    def to_core(self) -> tuple[core.Request, ...]:
        rag = replace((self.rag or TextRag()).to_core(), top_k=0)
        scored = bool(self.echo) and self.logprobs is not None
        if self.max_tokens == 0 and not self.echo:
            raise core.invalid("max_tokens", "max_tokens is 0 beside echo alone")
        if scored and self.stream:
            raise core.invalid(
                "echo", "log-probabilities of a prompt are not streamed: leave out stream, echo or logprobs"
            )
        sampling = self._sampling(self.max_tokens if self.max_tokens != 0 else 1, self.logprobs)
        prompts = (prompt if isinstance(prompt, str) else tuple(prompt) for prompt in self.prompt)
        kept = breakpoints_of({}, self.prompt_cache_retention)
        asked = [core.Request(prompt=one, sampling=sampling, rag=rag, breakpoints=kept, echo=scored) for one in prompts]
        return choices(asked, self.n or 1)
