"""Names that the command line knows, and what each stands for; a module outside the package adds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ragjax.core.check import reason_of
from ragjax.core.errors import ConfigError

T = TypeVar("T")

RENAMED: Mapping[str, str] = {"ragjax": "anchor"}
"""Earlier names of strategies: requests, flags and quality reports may still say them."""


def strategy_named(name: str) -> str:
    return RENAMED.get(name, name)


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: what may have been meant, or else what there is."""
    there = list(known)
    near = get_close_matches(name, there, n=1)
    return f"did you mean {near[0]}? There are {', '.join(there)}" if near else f"choose one of {', '.join(there)}"


def name_of(text: str) -> str:
    return text.partition(":")[0]


def settings_of(kind: str, text: str, made: type[Any]) -> dict[str, Any]:
    """The settings in "NAME:field=value,field=value", of those parameters of a class that have defaults.

    kind: what the class is, for errors.
    """
    name, _, rest = text.partition(":")
    hints = get_type_hints(made.__init__, include_extras=True)
    known = [one.name for one in signature(made).parameters.values() if one.default is not Parameter.empty]
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        field, given, value = part.partition("=")
        if field not in known or not given:
            takes = f"it takes {', '.join(f'{one}=' for one in known)}" if known else "it takes no settings"
            raise ConfigError(f"{kind} {name}: cannot read {part!r}; {takes}")
        try:
            found[field] = TypeAdapter(hints[field]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{kind} {name}: {field} {reason_of(error)}, not {value!r}") from None
    return found


Made = TypeVar("Made", bound=Callable[..., Any])


class Registry(dict[str, T]):
    """Values by name, in the order in which they were registered. kind: what they are, in the singular, for errors."""

    def __init__(self, kind: str):
        super().__init__()
        self._kind = kind

    def add(self, name: str, value: T) -> None:
        if name in self:
            raise ValueError(f"the {self._kind} {name!r} is registered already")
        self[name] = value

    def lookup(self, name: str) -> T:
        if name not in self:
            raise ConfigError(f"unknown {self._kind} {name!r}; {meant(name, self)}")
        return self[name]

    def configured(self, text: str) -> tuple[T, dict[str, Any]]:
        value = self.lookup(name_of(text))
        return value, settings_of(self._kind, text, cast(type[Any], value))

    def register(self, name: str) -> Callable[[Made], Made]:
        def registered(made: Made) -> Made:
            self.add(name, cast(T, made))
            return made

        return registered
