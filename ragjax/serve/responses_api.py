"""Bodies of OpenAI's Responses API: a response whole, or the typed events of a stream, which end with the whole."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from ragjax import core
from ragjax.serve.error import ApiError
from ragjax.serve.response import Json, account, citations_of, logprobs_of
from ragjax.serve.schema.response import RESULTS, ResponseBody
from ragjax.serve.tool_calls import CallReader, Piece

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Output:
    """Output items so far. Each method changes them and yields the typed events that tell of the change."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._logprobs: list[Json] = []

    def search(self, question: str) -> Iterator[Json]:
        item = {"id": new_id("fs"), "type": "file_search_call", "status": "in_progress", "queries": [question]}
        yield from self._add({**item, "results": None})
        yield self._told("file_search_call.in_progress")
        yield self._told("file_search_call.searching")

    def found(self, results: Sequence[Json] | None) -> Iterator[Json]:
        """Ends the search, which is the first item. results: its passages, if they are to be shown."""
        self.items[0] |= {"status": "completed", "results": None if results is None else list(results)}
        yield self._told("file_search_call.completed", 0)
        yield self._event("output_item.done", 0, item=dict(self.items[0]))

    def say(self, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        if not self._open("message"):
            yield from self._begin_message()
        self._part["text"] += text
        self._logprobs += logprobs
        yield self._told("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def put(self, piece: Piece, logprobs: Sequence[Json]) -> Iterator[Json]:
        if piece.said:
            yield from self.say(piece.said, logprobs)
        elif piece.name:
            if self._open("message") or self._open("function_call"):
                yield from self.end("completed", ())
            call = {"id": new_id("fc"), "type": "function_call", "status": "in_progress", "arguments": ""}
            yield from self._add({**call, "call_id": new_id("call"), "name": piece.name})
        else:
            self.items[-1]["arguments"] += piece.arguments
            yield self._told("function_call_arguments.delta", delta=piece.arguments)

    def end(self, status: str, annotations: Sequence[Json]) -> Iterator[Json]:
        """Ends the last item; an answer without text is an empty message."""
        if self._open("function_call"):
            call = self.items[-1]
            yield self._told("function_call_arguments.done", name=call["name"], arguments=call["arguments"])
        else:
            if not self._open("message"):
                yield from self._begin_message()
            part = self._part
            for i, one in enumerate(annotations):
                yield self._told("output_text.annotation.added", content_index=0, annotation_index=i, annotation=one)
            part |= {"annotations": list(annotations), "logprobs": self._logprobs}
            yield self._told("output_text.done", content_index=0, text=part["text"], logprobs=self._logprobs)
            yield self._told("content_part.done", content_index=0, part=dict(part))
        self.items[-1]["status"] = status
        yield self._event("output_item.done", len(self.items) - 1, item=dict(self.items[-1]))

    def break_off(self) -> None:
        for item in self.items:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"

    def _begin_message(self) -> Iterator[Json]:
        item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield from self._add(item)
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._told("content_part.added", content_index=0, part=dict(part))

    def _open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind

    @property
    def _part(self) -> Json:
        part: Json = self.items[-1]["content"][0]
        return part

    def _add(self, item: Json) -> Iterator[Json]:
        self.items.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("output_item.added", len(self.items) - 1, item=shown)

    def _told(self, kind: str, at: int = -1, **more: object) -> Json:
        at %= len(self.items)
        return self._event(kind, at, item_id=self.items[at]["id"], **more)

    @staticmethod
    def _event(kind: str, at: int, **more: object) -> Json:
        return {"type": f"response.{kind}", "output_index": at, **more}


async def whole(told: AsyncGenerator[Json, None]) -> Json:
    """Returns the response that the last event of a stream holds."""
    async with aclosing(told) as events:
        *_, last = [event async for event in events]
    response: Json = last["response"]
    return response


PARAMS: Mapping[str, str] = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""What fields are called here whose names in errors are those of chat."""
ALWAYS: Json = {"parameters": {}, "strict": True}
"""Fields of a function that OpenAI always gives."""
CODES: Mapping[str, str] = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}
"""Codes that a failed response may have, by the type of the error; all others are errors of the server."""


class Reply:
    def __init__(self, engine: Service, body: ResponseBody, request: core.Request, notices: Sequence[str]):
        self._engine = engine
        self._body = body
        self._request = request
        self._notices = notices
        self._output = Output()
        self._reader = CallReader.of(engine.call_form, request)
        self._unsaid: list[Json] = []  # log-probabilities of tokens that the reader holds back
        self._number = 0
        self._sources: tuple[core.Citation, ...] = ()  # of the prompt, once they are known
        self._head = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}

    def failed(self, error: ApiError) -> Json:
        return self._numbered({"type": "response.failed", "response": self.broken_off("failed", error)})

    def broken_off(self, status: str, error: ApiError | None = None) -> Json:
        """Returns the response that ends here, with what was said until now."""
        failure = None
        if error is not None:
            told = error.body["error"]
            failure = {"code": CODES.get(told["type"] or "", "server_error"), "message": told["message"]}
        self._output.break_off()
        return self._response(status, error=failure)

    async def told(self, events: AsyncGenerator[core.Event, None]) -> AsyncGenerator[Json, None]:
        """Yields events, the last with the whole response; none comes before the engine's first event."""
        begun = False
        async with aclosing(events) as came:
            try:
                async for event in came:
                    self._sources = self._sources or event.sources
                    for said in () if begun else self._opening():
                        yield self._numbered(said)
                    begun = True
                    if isinstance(event, core.Delta):
                        self._unsaid += logprobs_of(event.logprobs, self._engine.token_bytes)
                        more = self._put(self._reader.push(event.text))
                    else:
                        more = self._ending(event, await asyncio.to_thread(self._results, event))
                    for said in more:
                        yield self._numbered(said)
            except core.RequestError as error:  # it has the field's name of chat
                param = error.param or ""
                name = next((PARAMS[old] + param[len(old) :] for old in PARAMS if param.startswith(old)), error.param)
                raise core.RequestError(str(error), param=name, code=error.code) from error

    def _opening(self) -> Iterator[Json]:
        response = self._response("in_progress")
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}
        if self._body.search is not None:
            yield from self._output.search(self._request.question)
            if RESULTS not in (self._body.include or ()):  # else its passages are known with the answer
                yield from self._output.found(None)

    def _put(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        for piece in pieces:
            found, self._unsaid = self._unsaid, []
            yield from self._output.put(piece, found)

    def _ending(self, answer: core.Answer, results: Sequence[Json] | None) -> Iterator[Json]:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        yield from self._put(self._reader.finish())
        if self._unsaid and not self._reader.names:  # of tokens without a text of their own
            yield from self._output.say("", self._unsaid)
        yield from self._output.end(status, self._annotations(answer))
        if results is not None:
            yield from self._output.found(results)
        yield {"type": f"response.{status}", "response": self._response(status, answer)}

    def _results(self, answer: core.Answer) -> list[Json] | None:
        """Lists the passages that the search put into the prompt, in its order; None if they are not to be shown."""
        if self._body.search is None or RESULTS not in (self._body.include or ()):
            return None
        library, names = self._engine.library, ("file_id", "filename", "page", "heading", "score", "text")
        return [
            {
                **{name: getattr(one, name) for name in names},
                "attributes": {} if one.knowledge is None else dict(library.attributes(one.knowledge, one.file_id)),
            }
            for one in answer.sources
        ]

    def _annotations(self, answer: core.Answer) -> list[Json]:
        """Cites each page, or file without pages, that has a passage in the prompt, once, at the end of the text."""
        items = self._output.items
        said = len(items[-1]["content"][0]["text"]) if items and items[-1]["type"] == "message" else 0
        cited: dict[tuple[str, int | None], core.Citation] = {}
        for source in answer.sources:
            cited.setdefault((source.file_id, source.page), source)
        return [
            {
                "type": "file_citation", "index": said, "file_id": one.file_id, "filename": one.filename,
                "page": one.page, "heading": one.heading,
            }
            for one in cited.values()
        ]  # fmt: skip

    def _numbered(self, event: Json) -> Json:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _response(self, status: str, answer: core.Answer | None = None, error: Json | None = None) -> Json:
        body, sampling = self._body, self._request.sampling
        given = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text"})
        choice = given.get("tool_choice", {"type": "auto"})
        rag = {"sources": citations_of(self._sources)} if self._sources else None
        if answer is not None:
            rag = account(answer, self._engine.pieces, self._notices)
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._engine.model_name,
            "output": [dict(item) for item in self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": choice["type"] if choice["type"] in ("auto", "none", "required") else choice,
            "tools": [{**ALWAYS, **one} if one["type"] == "function" else one for one in given.get("tools", ())],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else _usage(answer),
            "metadata": dict(body.metadata or {}),
            "rag": rag,
        }


def _usage(answer: core.Answer) -> Json:
    said = len(answer.tokens)
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": answer.written},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + said,
    }
