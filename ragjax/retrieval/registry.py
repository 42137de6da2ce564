"""Knowledge bases, or graphs, by name, and whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ragjax.core import RequestError
from ragjax.core.registry import meant
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import KnowledgeBase

T = TypeVar("T", bound=KnowledgeBase | KnowledgeGraph)


class KnowledgeRegistry(Generic[T]):
    """Knowledge bases, or graphs. Each is opened when first filled; the first one without an owner is the default.

    kind: what they are called in errors. param: the request's field that names one, for errors. open_one: opens one by
    name (None: none can be made).
    """

    def __init__(self, kind: str, param: str, open_one: Callable[[str], T] | None):
        self._kind = kind
        self._param = param
        self._open = open_one
        self._held: dict[str, T] = {}
        self._owners: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        held = tuple(self._held)  # at once: other threads add and drop some
        return tuple(name for name in held if name not in self._owners)

    @property
    def owners(self) -> dict[str, str | None]:
        held = tuple(self._held)
        return dict(sorted(((name, self._owners.get(name)) for name in held), key=lambda one: one[1] is not None))

    def get(self, name: str | None = None) -> T:
        name = self._name(name)
        if name not in self._held:
            raise self._unknown(name)
        return self._held[name]

    def seen(self, name: str | None, tenant: str) -> T:
        """Get one for a tenant ("": for nobody): what another one owns is not there."""
        name = self._name(name)
        if self._owners.get(name, tenant) != tenant:
            raise self._unknown(name)
        return self.get(name)

    def owned(self, name: str | None) -> bool:
        return name in self._owners

    def make(self, name: str | None = None, owner: str | None = None) -> T:
        name = self._name(name)
        if name not in self._held and self._open is not None:
            opened = self._open(name)
            if owner is not None:
                self._owners[name] = owner  # before it can be found
            self._held[name] = opened
        return self.get(name)

    def drop(self, name: str) -> None:
        self.get(name).close()
        del self._held[name]
        self._owners.pop(name, None)

    def close(self) -> None:
        for one in list(self._held.values()):
            one.close()

    def _unknown(self, name: str) -> RequestError:
        known = meant(name, self.names) if self.names else "there is none"
        return RequestError(f"unknown {self._kind} {name!r}; {known}", param=self._param, code="not_found")

    def _name(self, name: str | None) -> str:
        return next(iter(self.names), "default") if name is None else name
