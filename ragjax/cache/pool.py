"""Reference-counted page numbers of the device pool: the book-keeping beside the arrays, which live elsewhere.

A page is free, or it counts its references: one per run that touches it (two halves of a split node both
touch the page their boundary lies in). Some references are pinned: those of runs a request is using. A page
without pinned references can be had by evicting, so `reclaimable_pages` answers in O(1) whether a
reservation can succeed at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError, OutOfPages, Run


class PagePool:
    """Hands out page numbers 1 to `num_pages - 1`; page 0 is scratch, where padding rows write."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"a pool of {num_pages} pages of {page_size} tokens holds nothing (page 0 is scratch): "
                "give the device cache more memory"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        self._pinned = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._reclaimable = num_pages - 1

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def reclaimable_pages(self) -> int:
        return self._reclaimable

    @property
    def counts(self) -> NDArray[np.int32]:
        return np.asarray(self._counts, np.int32)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def allocate(self, n_tokens: int) -> Run:
        if n_tokens < 1:
            raise ValueError(f"a run holds at least one token, not {n_tokens}")
        need = self.pages_for(n_tokens)
        if need > len(self._free):
            raise OutOfPages(f"{n_tokens} tokens need {need} pages; {len(self._free)} of {self.capacity} are free")
        pages = tuple(self._free.pop() for _ in range(need))
        for page in pages:
            self._counts[page] = 1
        return Run(pages, 0, n_tokens)

    def retain(self, run: Run) -> None:
        self._require_held(run)
        for page in run.pages:
            self._counts[page] += 1

    def release(self, run: Run) -> None:
        self._require_held(run)
        for page in run.pages:
            if self._counts[page] == self._pinned[page]:
                raise ValueError(f"page {page} has only pinned references: unpin before releasing")
        for page in run.pages:
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def pin(self, run: Run) -> None:
        for page in run.pages:
            if self._pinned[page] == self._counts[page]:
                raise ValueError(f"page {page} has no unpinned reference: retain before pinning")
        for page in run.pages:
            self._reclaimable -= self._pinned[page] == 0
            self._pinned[page] += 1

    def unpin(self, run: Run) -> None:
        for page in run.pages:
            if self._pinned[page] == 0:
                raise ValueError(f"page {page} is not pinned")
        for page in run.pages:
            self._pinned[page] -= 1
            self._reclaimable += self._pinned[page] == 0

    def all_pinned(self, run: Run) -> bool:
        """True if dropping a reference to this run can free no page, now or later."""
        return all(self._pinned[page] for page in run.pages)

    def _require_held(self, run: Run) -> None:
        for page in run.pages:
            if not (0 < page < self.num_pages and self._counts[page]):
                raise ValueError(f"page {page} is not held")
