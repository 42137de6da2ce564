"""Drawings in Graphviz's language, as docs/figure/ has them."""

from __future__ import annotations

import re
from itertools import pairwise, product


def edges(source: str) -> set[tuple[str, str]]:
    """The arrows of a drawing, of nodes in chains, of which any may be a set: `a -> b -> {c d};`."""
    chains = re.findall(r"^\s*((?:\w+|\{[\w ]+\})(?: -> (?:\w+|\{[\w ]+\}))+);", source, re.MULTILINE)
    found: set[tuple[str, str]] = set()
    for chain in chains:
        steps = [step.strip("{}").split() for step in chain.split(" -> ")]
        for here, there in pairwise(steps):
            found.update(product(here, there))
    assert found, "no arrows"
    return found
