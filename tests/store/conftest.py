"""A store of the disk tier, open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragjax.store.disk import DiskStore
from tests.support.disks import open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with open_store(tmp_path) as store:
        yield store
