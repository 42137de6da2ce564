"""What running requests are computing now, so that nobody else computes it too."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ragjax.cache.outlook import Look
from ragjax.schedule.state import RequestState


class Computing:
    """Pieces of KV by name, each with the running request that will keep it once it is computed.

    A request counts from its start until its prompt is computed, or until it fails, leaves, or is to start again: then
    one of those that waited computes what is still missing.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, RequestState] = {}

    def begin(self, state: RequestState, names: Iterable[bytes]) -> None:
        """A request has started and computes these pieces; those in the background rest too often to be waited for."""
        if not state.background and not state.decoding:
            for name in names:
                self._owners.setdefault(name, state)

    def prune(self) -> None:
        """Forget requests that compute their prompts no more."""
        if self._owners:
            self._owners = {name: state for name, state in self._owners.items() if state.running and not state.decoding}

    def awaited(self, look: Callable[[], Look]) -> dict[bytes, int]:
        """The pieces missing to a request that a running one is computing, tokens by name."""
        if not self._owners:
            return {}
        return {name: tokens for name, tokens in look().missing.items() if name in self._owners}
