"""Output items of a response, and the typed events that tell of them while they come (OpenAI's Responses API)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from ragjax.serve.calls import Piece
from ragjax.serve.response import Json


def new_id(prefix: str) -> str:
    """A new id."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Output:
    """The items so far. Each method changes them, and yields the events of that; all events have a type."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._logprobs: list[Json] = []

    # ------------------------------------------------------------------------------------------ a search

    def search(self, question: str) -> Iterator[Json]:
        """A search begins."""
        item = {"id": new_id("fs"), "type": "file_search_call", "status": "in_progress", "queries": [question]}
        yield from self._add({**item, "results": None})
        yield self._told("file_search_call.in_progress")
        yield self._told("file_search_call.searching")

    def found(self, results: Sequence[Json] | None) -> Iterator[Json]:
        """The search, which is the first item, has ended. results: its passages, if they are to be shown."""
        self.items[0] |= {"status": "completed", "results": None if results is None else list(results)}
        yield self._told("file_search_call.completed", 0)
        yield self._event("output_item.done", 0, item=dict(self.items[0]))

    # ------------------------------------------------------------------------------------ texts and calls

    def say(self, text: str, logprobs: Sequence[Json]) -> Iterator[Json]:
        """More of the text."""
        if not self._open("message"):
            yield from self._begin_message()
        self._part["text"] += text
        self._logprobs += logprobs
        yield self._told("output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))

    def put(self, piece: Piece, logprobs: Sequence[Json]) -> Iterator[Json]:
        """A piece of an answer that may call a function."""
        if piece.said:
            yield from self.say(piece.said, logprobs)
        elif piece.name:
            call = {"id": new_id("fc"), "type": "function_call", "status": "in_progress", "arguments": ""}
            yield from self._add({**call, "call_id": new_id("call"), "name": piece.name})
        else:
            self.items[-1]["arguments"] += piece.arguments
            yield self._told("function_call_arguments.delta", delta=piece.arguments)

    def end(self, status: str, annotations: Sequence[Json]) -> Iterator[Json]:
        """The answer has ended; one of no text is a message without any."""
        if self._open("function_call"):
            call = self.items[-1]
            yield self._told("function_call_arguments.done", name=call["name"], arguments=call["arguments"])
        else:
            if not self._open("message"):
                yield from self._begin_message()
            yield from self._end_message(annotations)
        self.items[-1]["status"] = status
        yield self._event("output_item.done", len(self.items) - 1, item=dict(self.items[-1]))

    def break_off(self) -> None:
        """The answer has failed: what has not ended stays incomplete."""
        for item in self.items:
            if item["status"] == "in_progress":
                item["status"] = "incomplete"

    def _begin_message(self) -> Iterator[Json]:
        item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield from self._add(item)
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._told("content_part.added", content_index=0, part=dict(part))

    def _end_message(self, annotations: Sequence[Json]) -> Iterator[Json]:
        part = self._part
        for i, annotation in enumerate(annotations):
            yield self._told("output_text.annotation.added", content_index=0, annotation_index=i, annotation=annotation)
        part |= {"annotations": list(annotations), "logprobs": self._logprobs}
        yield self._told("output_text.done", content_index=0, text=part["text"], logprobs=self._logprobs)
        yield self._told("content_part.done", content_index=0, part=dict(part))

    # --------------------------------------------------------------------------------------------- events

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
        """An event of an item, which names it."""
        at %= len(self.items)
        return self._event(kind, at, item_id=self.items[at]["id"], **more)

    @staticmethod
    def _event(kind: str, at: int, **more: object) -> Json:
        return {"type": f"response.{kind}", "output_index": at, **more}
