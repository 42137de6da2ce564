"""What the shared tier asks of a server: entries by key, and for each place the keys of what lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ragjax.core.tiers import Record, first_of
from ragjax.store.entry import DiskError

MOST = 64
"""Entries of one place that are looked at, the newest ones: questions of thousands may follow one system prompt."""


class RemoteError(DiskError):
    """The server cannot be reached, or does not answer in time."""


class RefusedError(RemoteError):
    """The server answered, and would not do it: it is full, say."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An entry on its way: header and arrays, byte for byte those of a file of the disk tier. place: see `place_of`."""

    key: bytes
    place: str
    head: bytes
    body: bytes

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.head) + len(self.body)


class Remote(Protocol):
    """Entries of one model on a server. Any thread may call anything; all calls but `close` wait for the server.

    Every method raises RemoteError, or RefusedError. address: of the server, without a password.
    """

    address: str

    def ping(self) -> None:
        """See whether the server answers."""
        ...

    def members(self, places: Sequence[str]) -> list[list[bytes]]:
        """Keys that were put at each place, `MOST` of them at most, newest first; some may be gone."""
        ...

    def heads(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The header of each entry; None where there is none."""
        ...

    def fetch(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        """Header and arrays of each entry; None where there is none."""
        ...

    def put(self, parcels: Sequence[Parcel]) -> int:
        """Keep entries, each instead of one of its key; returns how many others had to leave."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note accesses: what was touched longest ago leaves first."""
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove entries, those that there are."""
        ...

    def size(self) -> tuple[int, int]:
        """Number of the entries, and their bytes."""
        ...

    def close(self) -> None:
        """End the connections."""
        ...


def continuation(place: bytes, first: int) -> str:
    """Where causal and dependency entries lie that continue the context `place` with the token `first`."""
    return f"c:{place.hex()}:{first}"


def chunk(place: bytes) -> str:
    """Where approximate entries lie whose place is `place`."""
    return f"a:{place.hex()}"


def place_of(record: Record) -> str | None:
    """Where an entry lies; None: it is found by its key alone."""
    if record.provenance in ("causal", "dependency"):
        return continuation(record.place, first_of(record.tokens))
    return chunk(record.place) if record.provenance == "approximate" else None
