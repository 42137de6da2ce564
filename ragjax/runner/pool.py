"""The page pool on the device: its arrays, one pair for each stage of layers, and what moves pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ragjax.core import Grid
from ragjax.kernels.pages import Pages, from_storage
from ragjax.kernels.rope import Rotation
from ragjax.runner.device import room_for, untouched
from ragjax.runner.programs import Programs
from ragjax.runner.stages import OUTSIDE
from ragjax.store import device as page_store
from ragjax.store import host
from ragjax.store.device import Excerpt

MOVES = (16, 128, 1024)
"""Slots that one program moves."""


class DevicePool:
    """Keys and values of all layers, in pages.

    create: makes one array of keys and one of values, zeros, of a stage's layers. programs: these extract, insert and
    move.
    """

    def __init__(self, create: Callable[[], Pages], stages: int, programs: Programs, rotation: Rotation):
        self._create = create
        self._programs = programs
        self._rotation = rotation
        size = stages * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(create))) / 2**30
        with room_for(f"a cache of {size:.3g} GB beside the weights", "lower --device-cache-gb"):
            self._pools = [self._new() for _ in range(stages)]
        keys = self._pools[0].k_LPKCD
        self._depth, self._pages, _, self.page_size, _ = keys.shape
        self._dtype, self._pool_sharding = keys.dtype, keys.sharding

    def _new(self) -> Pages:
        """One pair of arrays; waits until it is there, so that no two are touched at a time."""
        return jax.tree.map(untouched, self._create())  # type: ignore[no-any-return]

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers at which a step may begin, ascending, and the number of layers as a last entry."""
        return tuple(range(0, self._depth * len(self._pools) + 1, self._depth))

    def extract(self, pages: NDArray[np.int32]) -> list[Excerpt]:
        """Copies of whole pages in all layers, in parts (`store.device.cuts`). Waits for nothing.

        The pages are read as they are now: whatever is dispatched later, the copies do not see. Here and below a page,
        slot, layer or offset out of range is a ValueError, before anything is changed.
        """
        check_range("pages", pages, self._pages, "pages of the pool")

        def take(part: NDArray[np.int32]) -> Excerpt:
            program = self._programs.get("extract", len(part))
            return tuple(program(pool, part) for pool in self._pools)

        return [take(pages[part]) for part in page_store.cuts(len(pages))]

    def upload(self, k_LPKCD: NDArray[Any], v_LPKCD: NDArray[Any]) -> list[Excerpt]:
        """Bring pages to the device, for `insert`; waits until they are there.

        Any thread may call it: it does not touch the pool. The arrays must not change afterwards: of the layers of one
        or more stages, in the pool's dtype.
        """

        def put(x_LPKCD: NDArray[Any], stage: slice, part: slice) -> jax.Array:
            x_LPKCD = x_LPKCD[stage, part].view(self._dtype)
            return host.upload(np.ascontiguousarray(x_LPKCD), self._pool_sharding)

        stages = [slice(i, i + self._depth) for i in range(0, k_LPKCD.shape[0], self._depth)]
        excerpts = [
            tuple(Pages(put(k_LPKCD, stage, part), put(v_LPKCD, stage, part)) for stage in stages)
            for part in page_store.cuts(k_LPKCD.shape[1])
        ]
        return jax.block_until_ready(excerpts)  # type: ignore[no-any-return]

    def insert(self, pages: NDArray[np.int32], excerpts: Sequence[Excerpt], first: int = 0) -> None:
        """Overwrite whole pages, none twice, by what `extract` or `upload` gave, in place. Waits for nothing.

        first: the stage that the excerpts begin with.
        """
        check_range("pages", pages, self._pages, "pages of the pool")
        if len(np.unique(pages)) != len(pages):
            raise ValueError("pages names a page twice")
        parts = list(page_store.cuts(len(pages)))
        if [excerpt[0].k_LPKCD.shape[1] for excerpt in excerpts] != [part.stop - part.start for part in parts]:
            raise ValueError(f"excerpts are not those of {len(pages)} pages")
        if any(not 0 <= first <= first + len(excerpt) < len(self.stages) for excerpt in excerpts):
            raise ValueError(f"excerpts from stage {first} on do not fit {len(self.stages) - 1} stages")
        for part, excerpt in zip(parts, excerpts, strict=True):
            program = self._programs.get("insert", part.stop - part.start)
            for i, new in enumerate(excerpt, first):
                self._pools[i] = program(self._pools[i], pages[part], new)

    def download(self, pages: NDArray[np.int32]) -> list[Excerpt]:
        """The bits of whole pages in all layers as NumPy arrays, for `restore`; waits until they are there."""
        copies: list[Excerpt] = jax.tree.map(np.asarray, host.download(self.extract(pages)))
        return copies

    def restore(self, pages: NDArray[np.int32], copies: Sequence[Excerpt]) -> None:
        self.insert(pages, jax.tree.map(lambda x: host.upload(x, self._pool_sharding), list(copies)))

    def clear(self, pages: NDArray[np.int32]) -> None:
        """Overwrite whole pages by zeros in all layers, where they may hold what is not finite. Waits for nothing."""
        keys = self._pools[0].k_LPKCD
        for part in page_store.cuts(len(pages)):
            shape = (self._depth, part.stop - part.start, *keys.shape[2:])
            zeros = Pages(*(jnp.zeros(shape, self._dtype, device=self._pool_sharding) for _ in "kv"))
            self.insert(pages[part], [(zeros,) * (len(self.stages) - 1)])

    def move(
        self,
        source_N: NDArray[np.int32],
        target_N: NDArray[np.int32],
        offset_N: NDArray[np.int32],
        layers: tuple[int, int],
    ) -> None:
        """Copy KV from slots to slots in some layers, in place, each key rotated by its offset. Waits for nothing.

        source_N: slots (page * C + slot) to read. target_N: slots to write, none twice and none of the source's.
        layers: half-open, at boundaries of stages.
        """
        self._check_copy(source_N, target_N, offset_N, layers)
        if np.isin(target_N, source_N).any():
            raise ValueError("target names a slot of the source")
        for begin in range(0, len(source_N), MOVES[-1]):
            part = slice(begin, begin + MOVES[-1])
            size = Grid.fit(MOVES, len(source_N[part]))
            spare = size - len(source_N[part])
            # padding is written nowhere: each has a slot of its own beyond the pool
            nowhere = np.arange(OUTSIDE, OUTSIDE + spare, dtype=np.int32)
            nothing = np.zeros(spare, np.int32)
            padded = ((source_N, nothing), (target_N, nowhere), (offset_N, nothing))
            arrays = [np.concatenate([x_N[part], padding]) for x_N, padding in padded]
            program = self._programs.get("move", size)
            for i in range(layers[0] // self._depth, layers[1] // self._depth):
                self._pools[i] = program(self._pools[i], *arrays, self._rotation)

    @property
    def lost(self) -> bool:
        """True if a pool is gone because a program that took it failed. Does not wait for running programs."""
        return any(_is_lost(array) for array in jax.tree.leaves(self._pools))

    def reset(self) -> None:
        for array in jax.tree.leaves(self._pools):
            if not array.is_deleted():
                array.delete()
        for i in range(len(self._pools)):
            self._pools[i] = self._new()

    def read(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Keys and values of slots, float32 [L, n, K, D] each: for audits and tests, not for serving."""
        page, slot = slots // self.page_size, slots % self.page_size

        def pick(pool: jax.Array) -> NDArray[np.float32]:
            return np.asarray(from_storage(pool[:, page, :, slot, :]).astype(jnp.float32)).swapaxes(0, 1)

        keys = [pick(pool.k_LPKCD) for pool in self._pools]
        values = [pick(pool.v_LPKCD) for pool in self._pools]
        return np.concatenate(keys), np.concatenate(values)

    def _check_copy(
        self,
        source_N: NDArray[np.int32],
        target_N: NDArray[np.int32],
        offset_N: NDArray[np.int32],
        layers: tuple[int, int],
    ) -> None:
        for name, slot_N in (("source", source_N), ("target", target_N)):
            check_range(name, slot_N, self._pages * self.page_size, "slots of the pool")
        if len(np.unique(target_N)) != len(target_N):
            raise ValueError("target names a slot twice")
        check_range("offset", np.abs(offset_N), self._rotation.cos_NR.shape[0], "positions of the rotation table")
        if not {*layers} <= {*self.stages} or layers[0] > layers[1]:
            raise ValueError(f"layers {layers} are not between two of {self.stages}")


def check_range(name: str, values: NDArray[np.int32], count: int, of: str) -> None:
    """On a GPU a stray page number reads stray memory."""
    wrong = (values < 0) | (values >= count)
    if wrong.any():
        raise ValueError(f"{name} holds {int(values[wrong.argmax()])}, outside of the {count} {of}")


def _is_lost(array: Any) -> bool:
    if array.is_deleted():
        return True
    if not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except Exception:  # the error of the program that should have made it, of whatever kind
        return True
    return False
