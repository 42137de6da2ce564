"""Files of the disk cache with random damage: an entry is read as it was written, or is Damaged."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from ragjax.store.entry import FORMAT, Damaged, encode
from ragjax.store.manifest import Manifest
from tests.support.disks import ABOUT, IDENTITY, arrays_of, decode, digest, record_of, same
from tests.support.mutation import EXAMPLES, altered, damaged, tried


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_entries(examples: int) -> None:
    arrays = arrays_of(digest("a"))
    whole = b"".join(bytes(piece.data) for piece in encode(record_of("a"), arrays, IDENTITY))

    def check(data: bytes) -> None:
        with suppress(Damaged):
            (found,) = decode(data)
            assert data == whole and same(found, arrays)

    check(whole)
    head = 8 + int.from_bytes(whole[:8], "little")
    tried(examples, damaged(whole), check)
    tried(examples, damaged(whole[:head]).map(lambda changed: changed + whole[head:]), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_manifests(tmp_path: Path, examples: int) -> None:
    fields = {"format": FORMAT, "identity": IDENTITY.hex(), "about": ABOUT}

    def check(data: bytes) -> None:
        (tmp_path / "manifest.json").write_bytes(data)
        with suppress(Damaged):
            assert isinstance(Manifest.read(tmp_path), Manifest)

    tried(examples, altered(fields) | damaged(json.dumps(fields).encode()), check)
