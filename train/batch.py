"""Batches of samples, packed side by side into rows of a few fixed lengths.

Attention keeps packed samples apart (`train.attention`), so nothing is padded to the longest of a batch. A
batch is cut into rows of one device each; a microbatch is one row for every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError, Tokens
from train.attention.mask import BLOCK_ROWS
from train.example import Example, View

TARGET_SHARE = 4
"""One token in so many of a row may be a target: logits are made for those alone."""


@dataclass(frozen=True)
class Item:
    """One sample of a step, by number; plain: in its plain form, or of the plain data."""

    index: int
    plain: bool = False


@dataclass(frozen=True)
class Order:
    """The order in which steps take samples: all once per epoch, shuffled anew, with plain ones among them.

    plain: the share of plain ones, drawn anew each epoch from `pool` many. A function of the seed alone, so a run that
    goes on at step n goes on exactly.
    """

    samples: int
    batch: int
    epochs: int
    plain: float
    pool: int
    seed: int

    @property
    def extra(self) -> int:
        """Plain ones in an epoch."""
        return round(self.samples * self.plain / (1 - self.plain))

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; the last takes what is left."""
        return -(-(self.samples + self.extra) // self.batch)

    @property
    def steps(self) -> int:
        return self.per_epoch * self.epochs

    def at(self, step: int) -> list[Item]:
        epoch, number = divmod(step, self.per_epoch)
        random = np.random.default_rng([self.seed, epoch])
        rounds = -(-self.extra // self.pool) if self.extra else 0
        drawn = [int(i) for _ in range(rounds) for i in random.permutation(self.pool)][: self.extra]
        items = [*(Item(i) for i in range(self.samples)), *(Item(i, plain=True) for i in drawn)]
        chosen = random.permutation(len(items))[number * self.batch : (number + 1) * self.batch]
        return [items[i] for i in chosen]


@dataclass(frozen=True)
class Rows:
    """Lengths that rows may have, ascending, in tokens."""

    lengths: tuple[int, ...]

    @staticmethod
    def up_to(longest: int) -> Rows:
        """The longest, and three, two and one quarter of it, all of them whole blocks of the attention kernel."""
        if longest < 4 * BLOCK_ROWS or longest % (4 * BLOCK_ROWS):
            raise ConfigError(f"a row must have a multiple of {4 * BLOCK_ROWS} tokens, not {longest}")
        return Rows(tuple(longest // 4 * quarters for quarters in (1, 2, 3, 4)))

    def fits(self, example: Example) -> bool:
        return len(example) <= self.lengths[-1] and example.targets <= targets_of(self.lengths[-1])

    def pack(self, examples: Sequence[Example], devices: int = 1) -> list[Microbatch]:
        """All of a step's examples: each row takes them longest first, the first that has room."""
        length = self.lengths[-1]
        rows: list[list[int]] = []
        room: list[list[int]] = []
        for i in sorted(range(len(examples)), key=lambda i: (-len(examples[i]), i)):
            need = (len(examples[i]), examples[i].targets)
            place = next((n for n, left in enumerate(room) if need[0] <= left[0] and need[1] <= left[1]), len(rows))
            if place == len(rows):
                rows.append([])
                room.append([length, targets_of(length)])
            rows[place].append(i)
            room[place] = [left - used for left, used in zip(room[place], need, strict=True)]
        return [self._microbatch(rows[n : n + devices], examples, devices) for n in range(0, len(rows), devices)]

    def _microbatch(self, rows: Sequence[list[int]], examples: Sequence[Example], devices: int) -> Microbatch:
        rows = [*rows, *([] for _ in range(devices - len(rows)))]
        return Microbatch.of(rows, examples, next(n for n in self.lengths if _holds(n, rows, examples)))


def targets_of(length: int) -> int:
    return length // TARGET_SHARE


def _holds(length: int, rows: Sequence[list[int]], examples: Sequence[Example]) -> bool:
    return all(
        sum(len(examples[i]) for i in row) <= length and sum(examples[i].targets for i in row) <= targets_of(length)
        for row in rows
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of packed samples, one for each device, end to end: int32 on the host, T tokens and N targets in all.

    request: number of the sample within its row, -1 for padding. index, position, hide_from, hide_until: as in
    `train.attention.mask.Tokens`. row: token within its row that predicts the target; target: -1 for padding.
    teacher_*: how the model that is learned from sees the tokens; where there is none, as the model that learns.
    """

    token_T: jax.Array
    position_T: jax.Array
    index_T: jax.Array
    request_T: jax.Array
    hide_from_T: jax.Array
    hide_until_T: jax.Array
    teacher_position_T: jax.Array
    teacher_hide_from_T: jax.Array
    teacher_hide_until_T: jax.Array
    row_N: jax.Array
    target_N: jax.Array

    def taught(self) -> Batch:
        """The same tokens as the teacher sees them."""
        return replace(
            self,
            position_T=self.teacher_position_T,
            hide_from_T=self.teacher_hide_from_T,
            hide_until_T=self.teacher_hide_until_T,
        )


@dataclass(frozen=True)
class Microbatch:
    """Rows computed at once. example_N: the example of the step that each target belongs to, -1 for padding.

    tokens, targets: without padding. pairs: how many pairs of tokens see each other.
    """

    batch: Batch
    example_N: Tokens
    tokens: int
    targets: int
    pairs: int

    @property
    def size(self) -> int:
        """Tokens with padding."""
        return int(self.batch.token_T.shape[0])

    @staticmethod
    def of(rows: Sequence[list[int]], examples: Sequence[Example], length: int) -> Microbatch:
        """Put the examples of each row, by number, side by side into rows of this length."""
        parts = [_row([examples[i] for i in row], length) for row in rows]
        joined: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        batch = Batch(**joined)
        owner = [np.repeat(np.array(row, np.int32), [examples[i].targets for i in row]) for row in rows]
        chosen = [examples[i] for row in rows for i in row]
        return Microbatch(
            batch,
            np.concatenate([_padded(x, targets_of(length), -1) for x in owner]),
            sum(len(example) for example in chosen),
            sum(example.targets for example in chosen),
            sum(pairs_of(example) for example in chosen),
        )


def _row(examples: Sequence[Example], length: int) -> dict[str, Any]:
    def joined(parts: Iterator[NDArray[Any]], padding: int, size: int = length) -> Tokens:
        return _padded(np.concatenate([np.zeros(0, np.int32), *parts]), size, padding)

    starts = np.cumsum([0, *(len(example) for example in examples)])
    learned = [np.flatnonzero(example.target >= 0) for example in examples]
    n = targets_of(length)
    teachers = [e.teacher or View(e.position, e.hide_from, e.hide_until) for e in examples]
    return {
        "token_T": joined((e.token for e in examples), 0),
        "position_T": joined((e.position for e in examples), 0),
        "index_T": joined((np.arange(len(e)) for e in examples), 0),
        "request_T": joined((np.full(len(e), i) for i, e in enumerate(examples)), -1),
        "hide_from_T": joined((e.hide_from for e in examples), 0),
        "hide_until_T": joined((e.hide_until for e in examples), 0),
        "teacher_position_T": joined((e.position for e in teachers), 0),
        "teacher_hide_from_T": joined((e.hide_from for e in teachers), 0),
        "teacher_hide_until_T": joined((e.hide_until for e in teachers), 0),
        "row_N": joined((at + start for at, start in zip(learned, starts[:-1], strict=True)), 0, n),
        "target_N": joined((e.target[at] for e, at in zip(examples, learned, strict=True)), -1, n),
    }


def _padded(x: NDArray[Any], size: int, value: int) -> Tokens:
    return np.concatenate([x, np.full(size - len(x), value)]).astype(np.int32)


def pairs_of(example: Example) -> int:
    """Pairs of row and key in an example's attention."""
    n = len(example)
    index = np.arange(n)
    hidden = np.clip(np.minimum(example.hide_until, n) - np.maximum(example.hide_from, index), 0, None)
    return int((n - index - hidden).sum())
