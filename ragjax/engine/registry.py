"""Knowledge bases and knowledge graphs by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ragjax.core import RequestError


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Give back what it holds."""
        ...


T = TypeVar("T", bound=Closable)


class Registry(Generic[T]):
    """Things of one kind, each opened when its name is first filled; the first one is the default.

    kind: what they are, and param: the request's field that names one, for errors.
    """

    def __init__(self, kind: str, param: str, open_one: Callable[[str], T] | None):
        self._kind = kind
        self._param = param
        self._open = open_one
        self._held: dict[str, T] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which they were opened."""
        return tuple(self._held)

    def get(self, name: str | None = None) -> T:
        """The one of this name (None: the default one).

        Raises:
            RequestError: if there is none of that name.
        """
        name = self._name(name)
        if name not in self._held:
            known = ", ".join(self._held) or "none"
            raise RequestError(f"unknown {self._kind} {name!r}; there is: {known}", param=self._param, code="not_found")
        return self._held[name]

    def make(self, name: str | None = None) -> T:
        """As `get`, and opened if need be."""
        name = self._name(name)
        if name not in self._held and self._open is not None:
            self._held[name] = self._open(name)
        return self.get(name)

    def close(self) -> None:
        """Close all."""
        for one in self._held.values():
            one.close()

    def _name(self, name: str | None) -> str:
        return next(iter(self._held), "default") if name is None else name
