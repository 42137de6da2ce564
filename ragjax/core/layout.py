"""Where tokens lie that layers keep in other numbers: pages of each layer, laid over the units of whole pages.

A page of the pool holds its slots in every layer. The slots of one layer are a *unit* of it. A request that keeps other
numbers of tokens in each layer takes whole pages as *containers*, and a layer's pages are any of their units: those of
layers that keep little hold tokens of layers that keep much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LayerTable:
    """The entries of a page table as each layer sees them, int32 [L, S] each.

    page: of the pool. lender: the layer whose unit of this page is read. seen: how many of its slots count, the first
    ones.
    """

    page_LS: NDArray[np.int32]
    lender_LS: NDArray[np.int32]
    seen_LS: NDArray[np.int32]

    @staticmethod
    def common(page_S: NDArray[np.int32], layers: int, page_size: int) -> LayerTable:
        """Entries that are the same in all layers, each in its own units."""
        shape = (layers, len(page_S))
        lender_LS = np.broadcast_to(np.arange(layers, dtype=np.int32)[:, None], shape).copy()
        return LayerTable(np.broadcast_to(page_S, shape).copy(), lender_LS, np.full(shape, page_size, np.int32))


@dataclass(frozen=True)
class Layout:
    """Tokens kept in each layer, and how their pages are laid over containers.

    kept: int32 [L]. reach: layers that may use each other's units, since one array holds them; it divides L.
    """

    kept_L: NDArray[np.int32]
    reach: int

    def pages_L(self, page_size: int) -> NDArray[np.int32]:
        """Pages that each layer takes, int32 [L]."""
        return -(-self.kept_L // page_size)

    def containers(self, page_size: int) -> int:
        """Whole pages whose units are enough, in every array."""
        units = self.pages_L(page_size).reshape(-1, self.reach).sum(1)
        return int((-(-units // self.reach)).max())

    def table(self, containers: Sequence[int], page_size: int) -> LayerTable:
        """The entries of the kept tokens, as many as the layer that keeps most has pages.

        Raises:
            ValueError: if the containers have too few units.
        """
        if len(containers) < self.containers(page_size):
            raise ValueError(f"{len(containers)} pages do not hold what takes {self.containers(page_size)}")
        pages_L, page_P = self.pages_L(page_size), np.asarray(containers, np.int32)
        number_S = np.arange(pages_L.max(), dtype=np.int32)
        table = LayerTable.common(np.full(len(number_S), page_P[0]), len(pages_L), page_size)
        table.seen_LS[:] = np.clip(self.kept_L[:, None] - page_size * number_S, 0, page_size)
        for first in range(0, len(pages_L), self.reach):
            layer_N, entry_N = np.nonzero(number_S < pages_L[first : first + self.reach, None])
            container_N, lender_N = np.divmod(np.arange(len(layer_N), dtype=np.int32), self.reach)
            table.page_LS[first + layer_N, entry_N] = page_P[container_N]
            table.lender_LS[first + layer_N, entry_N] = first + lender_N
        return table


def most_containers(budget: int, window: int, tokens: int, layers: int, reach: int, page_size: int) -> int:
    """Containers that are enough whatever each layer keeps of so many tokens.

    Each keeps at least `window`, and `budget` in the mean.
    """
    kept = min(reach * tokens, layers * budget - (layers - reach) * window)
    units = min(reach * -(-tokens // page_size), (kept + reach * (page_size - 1)) // page_size)
    return -(-units // reach)
