"""Bodies of Anthropic's Messages API: a chat in other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ragjax import core
from ragjax.serve.schema import body
from ragjax.serve.schema.body import Body, Many, Refusal, RefusingBody, Text, texts_as
from ragjax.serve.schema.chat import FEW_MESSAGES, FEW_TOOLS, KEEP_S, MOST_BREAKPOINTS, few_parts, tool_of, tools_of
from ragjax.serve.schema.rag import ChatRag


class CacheControl(Body):
    """A breakpoint of the prompt cache: what stands before it is kept for this time, within the tenant's bound."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _ContentBlock(Body):
    no_effect = frozenset({"citations", "caller"})

    cache_control: CacheControl | None = None


class TextBlock(_ContentBlock):
    type: Literal["text"]
    text: Text


class ToolUse(_ContentBlock):
    type: Literal["tool_use"]
    id: body.FilledName
    name: body.FunctionName
    input: dict[str, Any]


Texts = Annotated[Many[TextBlock], texts_as("text", str | list[TextBlock])]


class ToolResult(_ContentBlock):
    no_effect = frozenset({"is_error"})

    type: Literal["tool_result"]
    tool_use_id: body.FilledName
    content: Texts | None = None
    is_error: bool | None = None


class Thinking(_ContentBlock):
    """A thought of another model. It is not read."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text | None = None
    signature: Text | None = None
    data: Text | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")]
    | Annotated[Thinking, Tag("<thinking>")]
    | Annotated[Thinking, Tag("<redacted_thinking>")],
    Discriminator(body.tag_of("text")),
]


class TurnBody(Body):
    role: Literal["user", "assistant"]
    content: Annotated[Many[Block], texts_as("text", str | list[Block])]

    def to_core(self) -> Iterator[tuple[core.Message, list[tuple[int, CacheControl]]]]:
        """Yields results of tools, each as a message, and then what is said and called.

        With each message come its breakpoints, and the characters before them.
        """
        calls, said, marks = [], list[str](), list[tuple[int, CacheControl]]()
        for block in self.content:
            mark = [] if block.cache_control is None else [block.cache_control]
            if isinstance(block, ToolResult):
                result = "\n".join(part.text for part in block.content or ())
                inner = [part.cache_control for part in block.content or () if part.cache_control is not None]
                message = core.Message("tool", result, tool_call_id=block.tool_use_id)
                yield message, [(len(result), one) for one in (*inner, *mark)]
                continue
            if isinstance(block, ToolUse):
                calls.append(core.ToolCall(block.id, block.name, body.as_json(block.input, "messages")))
            elif isinstance(block, TextBlock):
                said.append(block.text)
            marks += [(len("\n".join(said)), one) for one in mark]
        if said or calls or self.role == "assistant" or not self.content:
            yield core.Message(self.role, "\n".join(said), tuple(calls)), marks


class MessageTool(Body):
    no_effect = frozenset({"eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: body.FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def to_core(self) -> core.Tool:
        return tool_of(self.name, self.description, self.input_schema, self.strict)


class MessageChoice(Body):
    """Choice of a tool: as the model likes, any, one by name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: body.FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


CHOICES = {"any": "required", "tool": "function"}
"""Choices that go by other names in chat."""


class ThinkingConfig(Body):
    """The choice if the model thinks, where its template has one."""

    no_effect = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(RefusingBody):
    """Body of POST /v1/messages/count_tokens. `rag: null` turns retrieval off."""

    no_effect = frozenset({"metadata", "service_tier", "inference_geo", "output_config", "speed"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "container": Refusal("this server runs no code"),
        "mcp_servers": Refusal("give the tools themselves", ([],)),
        "context_management": Refusal("send the messages that are to be read"),
    }

    model: body.Name
    messages: Annotated[Many[TurnBody], Field(min_length=1), few_parts("blocks", "texts"), FEW_MESSAGES]
    system: Texts | None = None
    tools: Annotated[Many[MessageTool], FEW_TOOLS] | None = None
    tool_choice: MessageChoice | None = None
    thinking: ThinkingConfig | None = None
    cache_control: CacheControl | None = None
    rag: ChatRag | None = Field(default_factory=ChatRag)

    def to_core(self) -> core.Request:
        choice = self.tool_choice or MessageChoice(type="auto")
        if choice.type != "tool":
            body.refuse_beside(choice.type, "tool_choice", name=choice.name)
        system, marks = "", list[tuple[int, CacheControl]]()
        for block in self.system or ():
            system += f"\n{block.text}" if system else block.text
            marks += [] if block.cache_control is None else [(len(system), block.cache_control)]
        # templates show tools with what the system says
        marks += [(len(system), tool.cache_control) for tool in self.tools or () if tool.cache_control is not None]
        said = [pair for turn in self.messages for pair in turn.to_core()]
        if system:
            said.insert(0, (core.Message("system", system), marks))
        else:
            said[0] = (said[0][0], marks + said[0][1])
        breakpoints = [
            core.Breakpoint(KEEP_S[mark.ttl or "5m"], number, size)
            for number, (_, found) in enumerate(said)
            for size, mark in found
        ]
        if self.cache_control is not None:
            breakpoints.append(core.Breakpoint(KEEP_S[self.cache_control.ttl or "5m"]))
        if len(breakpoints) > MOST_BREAKPOINTS:
            told = f"cache_control stands in {len(breakpoints)} places; {MOST_BREAKPOINTS} are taken"
            raise core.invalid("cache_control", told)
        tools, kind = [tool.to_core() for tool in self.tools or ()], CHOICES.get(choice.type, choice.type)
        return core.Request(
            messages=tuple(message for message, _ in said),
            sampling=self._sampling(),
            rag=None if self.rag is None else self.rag.to_core(),
            tools=tools_of(tools, kind, choice.name, not choice.disable_parallel_tool_use),
            template={} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"},
            breakpoints=tuple(breakpoints),
        )

    def _sampling(self) -> core.Sampling:
        return core.Sampling()


class MessageBody(CountBody):
    """Body of POST /v1/messages."""

    max_tokens: body.Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[body.Filled], Field(max_length=4)] | None = None
    stream: bool | None = None

    def _sampling(self) -> core.Sampling:
        given = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"}, exclude_none=True)
        return core.Sampling(**given, stop=tuple(self.stop_sequences or ()))
