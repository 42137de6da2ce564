"""Reuse strategies by name. A new method is one file and one line here."""

from ragjax.core import Wrapper
from ragjax.reuse.anchor import Anchored, Valued
from ragjax.reuse.base import Strategy
from ragjax.reuse.blend import Deviation, Gradual
from ragjax.reuse.craft import Craft
from ragjax.reuse.dependency import Dependency
from ragjax.reuse.epic import Leading
from ragjax.reuse.full import Full
from ragjax.reuse.fusion import Fused, QueryGuided
from ragjax.reuse.heavy_hitter import HeavyHitters, Recorded
from ragjax.reuse.naive import Naive
from ragjax.reuse.packet import Packet
from ragjax.reuse.prefix import Prefix
from ragjax.reuse.prophet import Prophetic
from ragjax.reuse.random import Random
from ragjax.reuse.ranking import without_beta, without_cci
from ragjax.reuse.repair import Selective
from ragjax.reuse.setcache import SetCache
from ragjax.reuse.stitch import Isolated
from ragjax.reuse.unmoved import Unmoved

BASELINES = frozenset({"unmoved", "set-cache", "random", "h2o", "craft-nobeta", "craft-nocci", "fusion-chunk"})
"""Strategies that stand in tables to be compared with; nobody should serve them."""

PREPROCESSED = frozenset({"fusion", "fusion-chunk", "fusion+blend", "fusion+craft", "ragjax"})
"""Strategies that take preprocessed chunks where there are some; their measured figures hold for these alone."""

DEPENDENCY = ("dependency", "dependency-preorder")
"""Strategies whose attention follows a knowledge graph; the first is that of graph requests that name none."""


def strategies(*, alpha: float = 1.0, wrapper: Wrapper | None = None, blocks: bool = False) -> dict[str, Strategy]:
    """Every strategy a request may name.

    alpha: Cache-Craft's, as `ragjax.reuse.calibrate` finds it. wrapper: of the model's packets, if it has some.
    blocks: whether the model was trained for chunks that see the system prompt and themselves alone.
    """
    made: tuple[Strategy, ...] = (
        Full(),
        Prefix(),
        Naive("block" if blocks else None),
        Selective("blend", Isolated(), Deviation()),
        Gradual(),
        Craft(alpha=alpha),
        Craft("craft-focus", alpha=alpha, focus=True),
        Craft("craft-nobeta", alpha=alpha, overhead=without_beta),
        Craft("craft-nocci", alpha=alpha, overhead=without_cci),
        Selective("fusion", Fused(), QueryGuided()),
        Selective("fusion-chunk", Fused(), QueryGuided("chunk")),
        Selective("fusion+blend", Fused(), Deviation()),
        Craft("fusion+craft", alpha=alpha, fused=True),
        Selective("ragjax", Anchored(), Valued()),
        Unmoved(),
        SetCache(),
        Selective("epic", Isolated(), Leading()),
        Selective("prophet", Isolated(), Prophetic()),
        Selective("random", Isolated(), Random()),
        Selective("h2o", Recorded(), HeavyHitters()),
        Dependency("path"),
        Dependency("preorder"),
    )
    packed = () if wrapper is None else (Packet(wrapper),)
    return {strategy.name: strategy for strategy in (*made, *packed)}
