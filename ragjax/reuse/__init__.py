"""Reuse strategies by name; a method of your own registers itself in `STRATEGIES`."""

from dataclasses import replace
from typing import Any

from ragjax.reuse.anchor import Anchored, Valued
from ragjax.reuse.base import STRATEGIES, ModelTraits, Strategy
from ragjax.reuse.blend import Deviation
from ragjax.reuse.craft import Craft
from ragjax.reuse.dependency import Dependency
from ragjax.reuse.exact import Full, Prefix
from ragjax.reuse.fusion import Fused, Prophetic, QueryGuided
from ragjax.reuse.moved import Moved
from ragjax.reuse.naive import Naive, Packet
from ragjax.reuse.repair import Selective
from ragjax.reuse.stitch import Isolated

__all__ = ["DEPENDENCY", "STRATEGIES", "ModelTraits", "strategies"]

DEPENDENCY = ("dependency", "dependency-preorder")
"""Strategies whose attention follows a knowledge graph; the first is that of graph requests that name none."""

STRATEGIES.add("full", lambda model: Full())
STRATEGIES.add("prefix", lambda model: Prefix())
STRATEGIES.add("naive", lambda model: Naive("block" if model.blocks else None))
STRATEGIES.add("moved", lambda model: Moved())
STRATEGIES.add("blend", lambda model: Selective("blend", Isolated(), Deviation()))
STRATEGIES.add("craft", lambda model: Craft(variants=model.craft))
STRATEGIES.add("craft-focus", lambda model: Craft("craft-focus", variants=replace(model.craft, focus=True)))
STRATEGIES.add("fusion", lambda model: Selective("fusion", Fused(), QueryGuided()))
STRATEGIES.add("fusion+blend", lambda model: Selective("fusion+blend", Fused(), Deviation()))
STRATEGIES.add("fusion+craft", lambda model: Craft("fusion+craft", variants=model.craft, fused=True))
STRATEGIES.add("anchor", lambda model: Selective("anchor", Anchored(), Valued()))
STRATEGIES.add("prophet", lambda model: Selective("prophet", Isolated(), Prophetic()))
STRATEGIES.add("dependency", lambda model: Dependency("path"))
STRATEGIES.add("dependency-preorder", lambda model: Dependency("preorder"))
STRATEGIES.add("packet", lambda model: None if model.wrapper is None else Packet(model.wrapper))


def strategies(**traits: Any) -> dict[str, Strategy]:
    """Every registered strategy that a model can be served by. traits: fields of `ModelTraits`."""
    model = ModelTraits(**traits)
    return {name: made for name, make in STRATEGIES.items() if (made := make(model)) is not None}
