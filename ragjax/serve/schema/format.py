"""How an answer is written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ragjax import core
from ragjax.serve.schema.body import Body, Name, Text, as_json, refuse_beside

SCHEMA_OF_OBJECTS = '{"type": "object"}'


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
        if self.type != "json_schema":
            refuse_beside(self.type, "response_format", json_schema=self.json_schema)
        if self.type == "text":
            return None
        if self.type == "json_object":
            return SCHEMA_OF_OBJECTS
        if self.json_schema is None or self.json_schema.schema_ is None:
            reason = 'response_format of type json_schema needs json_schema: {"name": …, "schema": {…}}'
            raise core.RequestError(reason, param="response_format.json_schema", code="missing_required_parameter")
        return as_json(self.json_schema.schema_, "response_format.json_schema.schema")
