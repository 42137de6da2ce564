"""Visibility among tokens computed at once, in O(n) numbers, and the tiles that it leaves to visit.

The rule is that of `visibility`, with every token both a row and a key. Rows are cut into blocks of B, keys into blocks
of C; a tile is a pair of them. A tile that is hidden whole is skipped, one that is visible whole needs no mask. Lists
of tiles are exact in this, and never truncated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from ragjax.kernels.table import Extent, Keys, seen_and_full

BLOCK_ROWS, BLOCK_KEYS = 128, 64
"""Block sizes where the caller does not say: what suits GPUs in bfloat16, and costs nothing on CPUs."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """Tokens of packed samples, int32 [T] each, in any sequence.

    index: 0 <= index < `core.NEVER`; a token sees none of a greater index. Need not be dense, nor rise along T.
    request: number of the sample; tokens see each other within one sample only. -1 for padding, whose other numbers
        may be anything.
    hide_from, hide_until: half-open interval of the indices that must not see this token.
    """

    index_T: jax.Array
    request_T: jax.Array
    hide_from_T: jax.Array
    hide_until_T: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """For each of N blocks on one side, the tiles it takes part in, named by their blocks on the other side (S).

    block_NS: int32; of row n, the first `full_N[n]` items are visible whole, those up to `count_N[n]` in part.
    full_N, count_N: int32.
    """

    block_NS: jax.Array
    full_N: jax.Array
    count_N: jax.Array

    @staticmethod
    def of(seen_NS: jax.Array, full_NS: jax.Array) -> Tiles:
        """Lists of the tiles seen at all, those seen whole first; bool [N, S] each, and full ones are seen."""
        rank_NS = jnp.where(full_NS, 0, jnp.where(seen_NS, 1, 2))
        block_NS = jnp.argsort(rank_NS, axis=1, stable=True).astype(jnp.int32)
        return Tiles(block_NS, full_NS.sum(1, dtype=jnp.int32), seen_NS.sum(1, dtype=jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Tokens and the tiles that their visibility leaves. The same for all layers: build it once a step.

    by_rows: the key blocks that each block of rows sees. by_keys: the row blocks that see each block of keys.
    """

    tokens: Tokens
    by_rows: Tiles
    by_keys: Tiles
    block_rows: int = field(metadata={"static": True})
    block_keys: int = field(metadata={"static": True})

    @staticmethod
    def build(tokens: Tokens, *, block_rows: int = BLOCK_ROWS, block_keys: int = BLOCK_KEYS) -> Mask:
        """The mask of these tokens; under jit the lists are made on the device.

        Both blocks must divide T. A block may hold tokens of several samples; it is then masked whole.
        """
        seen_NS, full_NS = _extent(tokens, block_rows, block_keys)
        return Mask(tokens, Tiles.of(seen_NS, full_NS), Tiles.of(seen_NS.T, full_NS.T), block_rows, block_keys)


def visible(rows: Tokens, keys: Tokens) -> jax.Array:
    """The rule, for rows and keys of shapes that broadcast against each other; bool."""
    # the rule of `visibility.sees` written out: in this order the backward kernel spills 16 bytes less
    hidden = (keys.hide_from_T <= rows.index_T) & (rows.index_T < keys.hide_until_T)
    return (rows.request_T >= 0) & (rows.request_T == keys.request_T) & (keys.index_T <= rows.index_T) & ~hidden


def _extent(tokens: Tokens, block_rows: int, block_keys: int) -> tuple[jax.Array, jax.Array]:
    """True where any row, and where every row, of a block sees keys of a block; bool [N, S] each.

    Exact where a block's rows are of one sample and of consecutive indices, on the safe side elsewhere. A block with
    padding sees no tile whole.
    """
    index_NB, request_NB = (x_T.reshape(-1, block_rows) for x_T in (tokens.index_T, tokens.request_T))
    live_NB = request_NB >= 0
    keys = (tokens.index_T, tokens.request_T, tokens.hide_from_T, tokens.hide_until_T)
    extent = Extent.of(index_NB, request_NB, live_NB)
    seen_NS, full_NS = seen_and_full(extent, Keys(*(x_T.reshape(-1, block_keys) for x_T in keys)))
    alike_N = (extent.first == extent.last) & live_NB.all(1)
    return seen_NS, full_NS & alike_N[:, None]
