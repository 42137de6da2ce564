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
    """Things of one kind, each opened when its name is first filled; the first one that nobody owns is the default.

    kind: what they are, and param: the request's field that names one, for errors.
    """

    def __init__(self, kind: str, param: str, open_one: Callable[[str], T] | None):
        self._kind = kind
        self._param = param
        self._open = open_one
        self._held: dict[str, T] = {}
        self._owners: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of those that nobody owns, in the order in which they were opened."""
        held = tuple(self._held)  # at once: other threads add and drop some
        return tuple(name for name in held if name not in self._owners)

    def get(self, name: str | None = None) -> T:
        """The one of this name (None: the default one).

        Raises:
            RequestError: if there is none of that name.
        """
        name = self._name(name)
        if name not in self._held:
            raise self._unknown(name)
        return self._held[name]

    def seen(self, name: str | None, tenant: str) -> T:
        """As `get`, by a tenant ("": by nobody): what another one owns is not there.

        Raises:
            RequestError: if there is none of that name.
        """
        name = self._name(name)
        if self._owners.get(name, tenant) != tenant:
            raise self._unknown(name)
        return self.get(name)

    def owned(self, name: str | None) -> bool:
        """Whether one of this name belongs to a tenant, or to those who are none."""
        return name in self._owners

    def make(self, name: str | None = None, owner: str | None = None) -> T:
        """As `get`, and opened if need be. owner: who alone may use it (None: everybody)."""
        name = self._name(name)
        if name not in self._held and self._open is not None:
            opened = self._open(name)
            if owner is not None:
                self._owners[name] = owner  # before it can be found
            self._held[name] = opened
        return self.get(name)

    def drop(self, name: str) -> None:
        """Close one, and forget it. Whoever uses it just now is told so."""
        self.get(name).close()
        del self._held[name]
        self._owners.pop(name, None)

    def close(self) -> None:
        """Close all."""
        for one in list(self._held.values()):
            one.close()

    def _unknown(self, name: str) -> RequestError:
        known = ", ".join(self.names) or "none"
        return RequestError(f"unknown {self._kind} {name!r}; there is: {known}", param=self._param, code="not_found")

    def _name(self, name: str | None) -> str:
        return next(iter(self.names), "default") if name is None else name
