"""In which order waiting requests start, by name. A new order is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ragjax.schedule.order.base import Order
from ragjax.schedule.order.fcfs import FCFS
from ragjax.schedule.order.joint import Joint
from ragjax.schedule.order.lpm import LPM
from ragjax.schedule.order.lsp import LSP
from ragjax.schedule.order.ratio import Ratio

BY_NAME: Mapping[str, Callable[[], Order]] = {"fcfs": FCFS, "ratio": Ratio, "lpm": LPM, "lsp": LSP, "joint": Joint}


def order_of(name: str) -> Order:
    """A fresh order."""
    return BY_NAME[name]()
