"""Which variant of a chunk serves in a prompt, and how much mending it takes (Cache-Craft, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragjax.cache.outlook import Keyed, Look
from ragjax.cache.tree import KnowledgeTree, Node
from ragjax.core.tiers import Record
from ragjax.reuse.influence import Influence, variant_digest

Overhead = Callable[[Influence, Sequence[bytes]], float]
"""What mending a variant takes, before alpha, where these segments stand before it."""

VARIANT = "craft"
"""Method under which variants are kept, whichever of the strategies made them."""


@dataclass(frozen=True)
class ChunkVariants:
    """A part of an outlook: a chunk, preprocessed or as a variant; one that is missing is computed under `name`."""

    fused: Keyed
    name: bytes
    tokens: int
    serving: Callable[[], bool]

    def look(self, tree: KnowledgeTree) -> Look:
        """Part of `Part`."""
        look = self.fused.look(tree)
        return Look({self.name: self.tokens}) if look.missing and self.serving() else look


@dataclass(frozen=True)
class Variant:
    """A variant of a chunk: its key, what it was computed behind, and what mending it would take before alpha."""

    key: bytes
    behind: bytes
    overhead: float


def rank(
    kept: Iterable[Node | Record], prior: Sequence[bytes], overhead: Overhead = Influence.mismatch, tau: float = 1.0
) -> list[Variant]:
    """A chunk's variants that serve here, that which takes the least mending first.

    kept: oldest first. prior: digests of the segments that stand before the chunk now. tau: a variant that was computed
    behind others serves up to this overhead.
    """
    here = variant_digest(prior)
    read = ((each.key, Influence.decode(each.meta)) for each in kept)
    found = [Variant(key, variant_digest(i.before), overhead(i, prior)) for key, i in read if i is not None]
    serving = (variant for variant in found if variant.overhead <= tau or variant.behind == here)
    return sorted(serving, key=lambda variant: (variant.overhead, variant.behind != here))
