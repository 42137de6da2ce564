"""Tools that an answer may call, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ragjax import core
from ragjax.serve.schema.body import Body, FunctionName, Text, as_json, refuse_beside


class FunctionTool(Body):
    """A function that an answer may call. parameters: JSON Schema of its arguments; it is followed in any case."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_core(self) -> core.Tool:
        """The same for the engine.

        Raises:
            core.RequestError: if the arguments are no object.
        """
        schema = self.parameters or {"properties": {}, "additionalProperties": False}
        schema = {"type": "object", **schema}
        if schema["type"] != "object":
            reason = f"the parameters of the tool {self.name} must be an object"
            raise core.RequestError(reason, param="tools", code="invalid_value")
        return core.Tool(self.name, self.description or "", as_json(schema, "tools"))


class ChatTool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionTool

    def to_core(self) -> core.Tool:
        """The same for the engine."""
        return self.function.to_core()


class NamedFunction(Body):
    """The name of a function."""

    name: FunctionName


class ToolChoice(Body):
    """Whether a tool is called: as the model likes, never, in any case, or this one."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None


def typed(choice: object) -> object:
    """A choice as an object: OpenAI's short form is its type alone."""
    return {"type": choice} if isinstance(choice, str) else choice


def tools_of(tools: Sequence[core.Tool], choice: ToolChoice | None) -> core.Tools | None:
    """The tools that an answer may call; None: it calls none.

    Raises:
        core.RequestError: for two tools of one name, or a choice that no tool fits.
    """
    choice = choice or ToolChoice(type="auto")
    if choice.type != "function":
        refuse_beside(choice.type, "tool_choice", function=choice.function)
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
    return core.Tools(tuple(tools), choice.type != "auto", named)
