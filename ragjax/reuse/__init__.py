"""Reuse strategies by name. A new method is one file and one line here."""

from ragjax.reuse.base import Strategy
from ragjax.reuse.full import Full
from ragjax.reuse.naive import Naive
from ragjax.reuse.prefix import Prefix


def strategies() -> dict[str, Strategy]:
    """Every strategy a request may name."""
    return {strategy.name: strategy for strategy in (Full(), Prefix(), Naive())}
