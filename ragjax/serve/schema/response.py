"""The body of a request for a response (OpenAI's Responses API)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from ragjax import core
from ragjax.serve.schema import body, chat
from ragjax.serve.schema.body import MOST_ENTRIES, TOO_LONG, Body, Many, Name, Refusal, RefusingBody, Text, at_most
from ragjax.serve.schema.chat import NO_EFFECT, REFUSED, joined, tools_of
from ragjax.serve.schema.rag import ChatRag
from ragjax.serve.schema.store import MOST_RESULTS, FilterBody, Ranking

Status = Literal["in_progress", "completed", "incomplete", "searching", "failed"]


class InputPart(Body):
    """One text part; images, audio and files are refused.

    annotations, logprobs: come back with the text of our own answers.
    """

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: chat.CacheBreakpoint | None = None


Parts = Annotated[Many[InputPart], body.texts_as("input_text", str | list[InputPart])]


class _Returned(Body):
    """id, status: come back with our own items."""

    id: Name | None = None
    status: Status | None = None


class InputMessage(_Returned):
    """A message; `developer` is OpenAI's newer name of `system`."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class FunctionCall(_Returned):
    """A call that the assistant made. arguments: as JSON text."""

    type: Literal["function_call"]
    call_id: body.FilledName
    name: body.FunctionName
    arguments: Text


class FunctionCallOutput(_Returned):
    type: Literal["function_call_output"]
    call_id: body.FilledName
    output: Parts


class SearchCall(_Returned):
    """A search of an earlier response. Its passages are not read again: the next search finds its own."""

    type: Literal["file_search_call"]
    queries: list[Text] | None = None
    results: list[Any] | None = None


class Reasoning(_Returned):
    """Reasoning of another model. It is not read."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: Text | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[SearchCall, Tag("<file_search_call>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(body.tag_of("message")),
]


_ITEMS = TypeAdapter(list[Item])


def messages_of(
    items: Sequence[Item], instructions: str | None = None
) -> tuple[tuple[core.Message, ...], Mapping[int, Sequence[InputPart]]]:
    """The chat that the items are, and the parts of its messages: calls belong to the assistant's message before them.

    instructions: what the system says first.
    """
    parts: dict[int, Sequence[InputPart]] = {}
    found: list[core.Message] = [] if instructions is None else [core.Message("system", instructions)]
    calls: dict[int, list[core.ToolCall]] = {}  # of each message, by its place
    for item in items:
        if isinstance(item, InputMessage):
            parts[len(found)] = item.content
            role = "system" if item.role == "developer" else item.role
            found.append(core.Message(role, joined(item.content)))
        elif isinstance(item, FunctionCallOutput):
            parts[len(found)] = item.output
            found.append(core.Message("tool", joined(item.output), tool_call_id=item.call_id))
        elif isinstance(item, FunctionCall):
            call = core.ToolCall(item.call_id, item.name, item.arguments)
            if not found or found[-1].role != "assistant":
                found.append(core.Message("assistant", ""))
            calls.setdefault(len(found) - 1, []).append(call)
    for place, made in calls.items():
        found[place] = replace(found[place], tool_calls=tuple(made))
    return tuple(found), parts


def earlier_items(kept: Sequence[core.KeptResponse]) -> list[Item]:
    """The items of a conversation: what each response was asked, and its output but for calls that broke off."""
    found = [item for one in kept for item in (*json.loads(one.items), *json.loads(one.body)["output"])]
    whole = [one for one in found if one.get("type") != "function_call" or one.get("status") != "incomplete"]
    return _ITEMS.validate_python(whole)


RESPONSE_REFUSED: Mapping[str, Refusal] = {
    "conversation": Refusal("use previous_response_id, or send the earlier items in input"),
    "background": Refusal("a response is made while the client waits: leave it out", (False,)),
    "truncation": Refusal('only "disabled" is served: shorten the input', ("disabled",)),
    "prompt": Refusal("prompts are not kept: use instructions and input"),
    "messages": Refusal("use input"),
    "response_format": Refusal("use text.format"),
    "max_tokens": Refusal("use max_output_tokens"),
    **{name: REFUSED[name] for name in ("audio", "modalities", "functions", "function_call")},
}
"""Fields that would change the answer and cannot be had."""
RESULTS = "file_search_call.results"
LOGPROBS = "message.output_text.logprobs"
MOST_STORES = 16  # vector stores of a search, at most
MOST_INCLUDED = 16  # values of `include`, at most


class TextFormat(Body):
    """Form of the text: free, a JSON object, or an instance of a JSON Schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def to_core(self) -> str | None:
        """The JSON Schema of the answer, as JSON text; None: it is text."""
        if self.type != "json_schema":
            body.refuse_beside(
                self.type, "text.format", schema=self.schema_, name=self.name, description=self.description
            )
        needs = 'text.format of type json_schema needs a schema: {"type": "json_schema", "name": …, "schema": {…}}'
        return chat.schema_text(self.type, self.schema_, "text.format.schema", needs)


class TextConfig(Body):
    no_effect = frozenset({"verbosity"})

    format: TextFormat | None = None


class SearchTool(Body):
    """A search in vector stores before the answer, by the user's last message. filters: of the files of all of them."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[body.FilledName], Field(min_length=1, max_length=MOST_STORES)]
    max_num_results: Annotated[int, Field(ge=1, le=MOST_RESULTS)] | None = None
    filters: FilterBody | None = None
    ranking_options: Ranking | None = None


class ResponseTool(chat.FunctionTool):
    type: Literal["function"]


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("<function>")] | Annotated[SearchTool, Tag("<file_search>")],
    Discriminator(body.tag_of("function")),
]


class ResponseChoice(Body):
    """Choice of a tool: as the model likes, none, any, a function by name, or the search alone."""

    type: Literal["auto", "none", "required", "function", "file_search"]
    name: body.FunctionName | None = None


Items = Annotated[
    Many[Item],
    Field(min_length=1),
    at_most(
        MOST_ENTRIES,
        "text parts in all items",
        "Join parts",
        field="input[].content",
        within=["content", "output"],
        code=TOO_LONG,
    ),
    at_most(MOST_ENTRIES, "items", "Send fewer items", field="input", code=TOO_LONG),
    BeforeValidator(
        lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given,
        json_schema_input_type=str | list[Item],
    ),
]


Choice = Annotated[ResponseChoice, BeforeValidator(chat.typed, json_schema_input_type=str | ResponseChoice)]
FEW_INCLUDED = at_most(MOST_INCLUDED, "values", "Name fewer", field="include")
Included = Annotated[list[Name], Field(max_length=MOST_INCLUDED), FEW_INCLUDED]


class ResponseBody(RefusingBody):
    """Body of POST /v1/responses. `rag: null` turns retrieval off.

    include: what else the response shall hold; what is neither RESULTS nor LOGPROBS has no effect.
    """

    no_effect = (NO_EFFECT - {"metadata", "store"}) | {"reasoning", "max_tool_calls", "stream_options"}
    refused = RESPONSE_REFUSED

    model: Name
    input: Items
    previous_response_id: body.FilledName | None = None
    store: bool | None = None
    instructions: Text | None = None
    max_output_tokens: body.Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: chat.Alternatives | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: Annotated[Many[AnyTool], chat.FEW_TOOLS] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: chat.Retention | None = None
    prompt_cache_options: chat.CacheOptions | None = None
    tool_choice: Choice | None = None
    include: Included | None = None
    metadata: body.Metadata | None = None
    rag: ChatRag | None = Field(default_factory=ChatRag)

    def in_vain(self) -> Iterator[str]:
        included = (name for name in self.include or () if name not in (RESULTS, LOGPROBS))
        idle = chat.idle_tools(self.tools, self.tool_choice)
        return chain(super().in_vain(), idle, (f"include {name}" for name in included))

    @property
    def search(self) -> SearchTool | None:
        found = [tool for tool in self.tools or () if isinstance(tool, SearchTool)]
        if len(found) > 1:
            reason = "there is one search before an answer: give one file_search tool, with all vector_store_ids"
            raise core.invalid("tools", reason)
        if any(len(set(tool.vector_store_ids)) < len(tool.vector_store_ids) for tool in found):
            raise core.invalid("tools", "a vector store is given twice")
        chosen = None if self.tool_choice is None else self.tool_choice.type
        if chosen == "file_search" and not found:
            raise core.invalid("tool_choice", "tool_choice is file_search, and there is no such tool")
        return found[0] if found and chosen != "none" else None

    def to_core(self, sources: tuple[core.Source, ...] = ()) -> core.Request:
        """Makes the request. sources: stores that its search looks in."""
        said = {"temperature": self.temperature, "top_p": self.top_p}
        given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        given["max_tokens"] = self.max_output_tokens
        wanted = self.top_logprobs is not None or LOGPROBS in (self.include or ())
        form = None if self.text is None else self.text.format
        schema, strict = (None, False) if form is None else (form.to_core(), bool(form.strict))
        logprobs = (self.top_logprobs or 0) if wanted else None
        messages, parts = messages_of(self.input, self.instructions)
        return core.Request(
            messages=messages,
            sampling=core.Sampling(**given, logprobs=logprobs, json_schema=schema, strict=strict),
            rag=self._rag(sources),
            tools=self._functions(),
            breakpoints=chat.breakpoints_of(parts, self.prompt_cache_retention),
        )

    def _rag(self, sources: tuple[core.Source, ...]) -> core.Rag | None:
        asked = self.search
        rag = None if self.rag is None else self.rag.to_core()
        if asked is None:
            return rag
        for name in ("knowledge", "top_k", "documents", "graph"):
            if rag is not None and getattr(rag, name) is not None:
                raise core.invalid(f"rag.{name}", f"give rag.{name} or the tool file_search, not both")
        ranking = asked.ranking_options or Ranking()
        return replace(
            rag or core.Rag(), top_k=asked.max_num_results, sources=sources, min_score=ranking.score_threshold
        )

    def _functions(self) -> core.Tools | None:
        functions = [tool.to_core() for tool in self.tools or () if isinstance(tool, ResponseTool)]
        choice = self.tool_choice
        if choice is None or (choice.type == "required" and not functions and self.search is not None):
            return tools_of(functions, parallel=self.parallel_tool_calls)
        if choice.type == "file_search":
            return None
        if choice.type != "function":
            body.refuse_beside(choice.type, "tool_choice", name=choice.name)
        return tools_of(functions, choice.type, choice.name, self.parallel_tool_calls)
