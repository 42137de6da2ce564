"""Values that are kept as long as they are used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values that were used last. Any thread may use it. most: what they weigh together, at most."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._weight = 0
        self.age = 0  # counts the times that all was forgotten

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def keep(self, key: K, value: V, age: int = 0, *, weight: int = 1) -> None:
        """Keep a value that was made at this age: one from before all was forgotten is left out, as is a heavier one
        than all may be.
        """
        with self._lock:
            if age != self.age or weight > self._most:
                return
            self._weight += weight - self._held.pop(key, (value, 0))[1]
            self._held[key] = value, weight
            while self._weight > self._most:
                self._weight -= self._held.popitem(last=False)[1][1]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._weight = 0
            self.age += 1
