"""What a router is, and what several of them do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from ragjax.cluster.router.need import Need

T = TypeVar("T")

Learn = Callable[[Sequence[int]], None]
"""Takes the tokens of each piece of a request that the replica's cache had."""


class Router(ABC):
    """Decides which replica gets a request. One thread calls it at a time."""

    @abstractmethod
    def order(self, need: Need, loads: Mapping[str, int]) -> Sequence[str]:
        """Replicas, the best one for the request first.

        loads: requests that each replica that runs has now, by its name; one that took the place of another has a new
        name.
        """

    def sent(self, need: Need, replica: str) -> Learn:
        """The replica has the request. What is returned is to be called when it has answered."""
        return _nothing


def _nothing(found: Sequence[int]) -> None:
    """Learns nothing."""


def bound(loads: Mapping[str, int], slack: float) -> float:
    """Requests that a replica may have with the one to be placed: `slack` times the mean that there is then.

    "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup, Zadimoghaddam, 2018): of 1 or more times the mean some
    replica is always below. One that has a single request may get another in any case.
    """
    return max(2.0, slack * (sum(loads.values()) + 1) / len(loads))


def keep(kept: OrderedDict[bytes, T], key: bytes, value: T, most: int) -> None:
    """Note a key as the last one used; beyond `most` of them the one used longest ago goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def forget(known: MutableMapping[str, Any], running: Collection[str]) -> None:
    """Drop what is kept of replicas that are gone."""
    for name in known.keys() - set(running):
        del known[name]
