"""Files of the disk cache with random damage: an entry is read as it was written, or is Damaged."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from ragjax.store.entry import FORMAT, Damaged, DiskError, encode
from ragjax.store.folder import Manifest
from tests.support.disks import (
    ABOUT,
    IDENTITY,
    arrays_of,
    begins,
    decode,
    digest,
    open_store,
    put,
    read_entry,
    record_of,
    same,
)
from tests.support.mutation import EXAMPLES, Spoil, altered, damaged, spoiled, spoils, tried


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


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_damaged_indexes(tmp_path: Path, suffix: str, examples: int) -> None:
    """The index, or what SQLite has not put into it yet: every entry is read as it was written, or not at all."""
    names = "abcdef"
    with open_store(tmp_path / "whole") as store:
        put(store, *names, place="p")
        shutil.copytree(store.folder, tmp_path / "kept" / store.folder.name)  # while there is a write-ahead log
    folder = tmp_path / "kept" / store.folder.name
    intact = (folder / f"index.sqlite{suffix}").read_bytes()
    if not suffix:
        (folder / "index.sqlite-wal").unlink()

    def check(spoil: Spoil) -> None:
        directory = tmp_path / "damaged"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "kept", directory)
        (directory / folder.name / f"index.sqlite{suffix}").write_bytes(spoiled(intact, spoil))
        with open_store(directory) as store:
            for name in names:
                store.find(digest(name))
                with suppress(DiskError):
                    assert same(read_entry(store, digest(name)), arrays_of(digest(name)))
            store.children(digest("p"), begins(7)), store.chunks(digest("p"))
            store.stats(), store.ages()
            with suppress(DiskError):
                store.verify()
        with open_store(directory) as store, suppress(DiskError):
            put(store, *names, "g", place="p")
            assert read_entry(store, digest("g")) is not None

    check(([], None))
    tried(examples, spoils(len(intact)), check)
