"""Names that the command line knows, and what each stands for; a module outside the package adds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, cast

from ragjax.core.errors import ConfigError

T = TypeVar("T")

RENAMED: Mapping[str, str] = {"ragjax": "anchor"}
"""Earlier names of strategies: requests, flags and quality reports may still say them."""


def strategy_named(name: str) -> str:
    """Today's name of a strategy."""
    return RENAMED.get(name, name)


def meant(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: what may have been meant, or else what there is."""
    there = list(known)
    near = get_close_matches(name, there, n=1)
    return f"did you mean {near[0]}? There are {', '.join(there)}" if near else f"choose one of {', '.join(there)}"


Made = TypeVar("Made", bound=Callable[..., Any])


class Registry(Mapping[str, T], Generic[T]):
    """Values by name, in the order in which they were registered.

    Args:
        kind: what the values are, in the singular, for errors.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, name: str, value: T) -> None:
        """Register a value."""
        if name in self._values:
            raise ValueError(f"the {self._kind} {name!r} is registered already")
        self._values[name] = value

    def lookup(self, name: str) -> T:
        """The value of this name."""
        if name not in self._values:
            raise ConfigError(f"unknown {self._kind} {name!r}; {meant(name, self._values)}")
        return self._values[name]

    def register(self, name: str) -> Callable[[Made], Made]:
        """Decorator that registers a class or function under this name."""

        def registered(made: Made) -> Made:
            self.add(name, cast(T, made))
            return made

        return registered
