"""The shared tier: entries behind the disk, where several processes use them.

What keeps them is no matter of this room. A package registers a tier for addresses of a scheme
(`ragjax/cluster/remote.py` does for Redis):

    @register_tier("redis", "rediss")
    def open_tier(url: str, identity: bytes, kind: AtRest, disk: DiskStore | None) -> SharedTier: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ragjax.core import AtRest, ConfigError
from ragjax.core.tiers import DiskIndex, Inquiry
from ragjax.store.disk import DiskStore
from ragjax.store.load import Disk


@dataclass(frozen=True)
class Standing:
    address: str
    on: bool  # whether it is used
    error: str | None  # why it is not
    entries: int  # of the whole server, as last heard
    bytes: int
    max_bytes: int  # 0: it has no bound
    counts: Mapping[str, int]
    dropped: Mapping[str, int]  # entries that were not written, by reason


class SharedTier(DiskIndex, Disk, Inquiry, Protocol):
    """Disk and shared tier together: the index of both, which answers later, and the bytes of their entries."""

    def listen(self, notify: Callable[[], None]) -> None: ...

    def standing(self) -> Standing: ...

    def close(self) -> None: ...


Opener = Callable[[str, bytes, AtRest, DiskStore | None], SharedTier]
"""Opens a tier: address, digest of all that makes two models' KV differ, encoding at rest, and the disk before it."""

_OPENERS: dict[str, Opener] = {}


def register_tier(*schemes: str) -> Callable[[Opener], Opener]:
    def register(opener: Opener) -> Opener:
        _OPENERS.update(dict.fromkeys(schemes, opener))
        return opener

    return register


def open_shared(url: str, identity: bytes, kind: AtRest, disk: DiskStore | None) -> SharedTier:
    scheme = url.partition("://")[0]
    if scheme not in _OPENERS:
        known = ", ".join(f"{name}://" for name in _OPENERS) or "none"
        reason = f"no tier is registered for it; there is: {known} (docs/scale.md)"
        raise ConfigError(f"the address of the shared cache cannot be used: {reason}")
    return _OPENERS[scheme](url, identity, kind, disk)
