"""The examples that a run learns from."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from ragjax.core import ConfigError, RequestError
from train.batch import Item, Rows
from train.example import Coder, Example
from train.sample import Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Examples of a run: those of the data, and what plain ones are drawn from."""

    main: tuple[Example, ...]
    pool: tuple[Example, ...]

    def take(self, items: Sequence[Item]) -> list[Example]:
        return [(self.pool if item.plain else self.main)[item.index] for item in items]

    @property
    def digest(self) -> str:
        """SHA-256 over all examples, what sees them and what is learned of them included, hexadecimal."""
        whole = hashlib.sha256()
        for example in (*self.main, *self.pool):
            view = (example.position, example.hide_from, example.hide_until, *(example.teacher or ()))
            parts = (example.token, example.target, *view)
            whole.update(len(example).to_bytes(4, "little") + b"".join(part.tobytes() for part in parts))
        return whole.hexdigest()

    @staticmethod
    def of(coder: Coder, samples: Sequence[Sample], plain: Sequence[Sample], rows: Rows, progress: bool) -> Corpus:
        """Encode samples; `plain` ones as causal chains."""
        main = encode(coder, samples, rows, progress)
        pool = encode(coder, plain, rows, progress, plain=True)
        if not main or (plain and not pool):
            raise ConfigError(f"no sample fits into a row of {rows.lengths[-1]} tokens: raise --row-tokens")
        return Corpus(tuple(main), tuple(pool))


def encode(
    coder: Coder, samples: Sequence[Sample], rows: Rows, progress: bool, *, plain: bool = False
) -> list[Example]:
    """Samples as examples; those that are too long or that the chat template refuses are left out, and counted."""
    found = []
    reasons = Counter[str]()
    for sample in tqdm(samples, desc="encoding", unit="sample", disable=not progress, leave=False):
        try:
            example = coder.example(sample, plain=plain)
        except RequestError as error:
            reasons[str(error)] += 1
            continue
        if rows.fits(example):
            found.append(example)
        else:
            reasons["too long"] += 1
    for reason, count in reasons.items():
        log.warning("%d of %d samples are left out: %s", count, len(samples), reason)
    return found


def check_taught(examples: Sequence[Example]) -> None:
    """Raise ConfigError for an example that full attention cannot read as it stands."""
    for example in examples:
        if example.teacher is None:
            raise ConfigError(
                f"sample {example.id} has paths, which full attention reads in another form: "
                "--target teacher takes samples with passages, and chats"
            )
