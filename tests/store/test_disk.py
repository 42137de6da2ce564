"""The disk tier: what is read is what was written, bit for bit, and found by who looks for it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open

from ragjax.cache.tree import common_prefix
from ragjax.core.tiers import Record
from ragjax.store import entry
from ragjax.store.disk import DiskStore
from ragjax.store.entry import DTYPES
from tests.support.disks import (
    IDENTITY,
    adds_up,
    arrays_of,
    begins,
    continued,
    decode,
    digest,
    holds,
    open_store,
    path_of,
    put,
    read_entry,
    record_of,
    same,
)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
kv = st.sampled_from(list(DTYPES)).flatmap(
    lambda dtype: hnp.arrays(np.uint8, shapes.map(lambda shape: (*shape, dtype.itemsize))).map(
        lambda raw: raw.view(dtype).squeeze(-1)
    )
)
names = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")


@given(st.dictionaries(names, kv, max_size=4))
def test_any_arrays_survive(arrays: dict[str, np.ndarray]) -> None:
    [got] = decode(np.concatenate(entry.encode(record_of("any"), arrays, IDENTITY)))
    assert same(got, arrays)
    assert all(array.flags.aligned and array.flags.writeable for array in got.values())


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_every_dtype_survives_on_disk(store: DiskStore, dtype: np.dtype) -> None:
    every_bit = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    arrays = {"k": every_bit.view(dtype).reshape(2, 4, -1, 8), "v": np.zeros((2, 0), dtype)}
    size = store.write(record_of("x"), arrays)
    assert same(read_entry(store, digest("x")), arrays)
    assert path_of(store, "x").stat().st_size == size == store.stats().bytes


def test_views_of_longer_arrays_survive(store: DiskStore) -> None:
    long = arrays_of(digest("x"))["k"]
    part = {"k": long[:, :, 2:5], "v": long[:, ::-1, 5:2:-1].swapaxes(0, 3)}
    store.write(record_of("x"), part)
    assert same(read_entry(store, digest("x")), part)


@pytest.mark.parametrize("field", ["tokens", "provenance", "method", "local_start", "lossy", "meta", "place"])
def test_every_field_of_a_record_survives_a_restart_and_a_lost_index(tmp_path: Path, field: str) -> None:
    other = {
        "tokens": np.array([-1, 2**31 - 1], "<i4").tobytes(),
        "provenance": "isolated",
        "method": "méthode \N{SNOWMAN}",
        "local_start": -5,
        "lossy": True,
        "meta": bytes(range(256)),
        "place": digest("elsewhere"),
    }
    record = replace(record_of("x"), **{field: other[field]})
    for lost in (False, True):
        with open_store(tmp_path) as store:
            store.write(record, arrays_of(record.key))
        if lost:
            (store.folder / "index.sqlite").unlink()
        with open_store(tmp_path) as store:
            assert store.find(record.key) == record
            assert same(read_entry(store, record.key), arrays_of(record.key))


def test_the_files_are_safetensors(store: DiskStore) -> None:
    put(store, "x")
    path = path_of(store, "x")
    assert same(safetensors.numpy.load_file(path), arrays_of(digest("x")))
    with safe_open(path, "np") as file:
        assert file.metadata()["key"] == digest("x").hex()
    exotic = {"b": np.ones(3, ml_dtypes.bfloat16), "f": np.ones((2, 2), ml_dtypes.float8_e4m3fn)}
    data = np.concatenate(entry.encode(record_of("y"), exotic, IDENTITY)).tobytes()
    described = {name: one for name, one in safetensors.deserialize(data)}
    assert {name: (one["dtype"], bytes(one["data"])) for name, one in described.items()} == {
        "b": ("BF16", exotic["b"].tobytes()),
        "f": ("F8_E4M3", exotic["f"].tobytes()),
    }


@pytest.mark.parametrize(
    ("record", "arrays", "named"),
    [
        (record_of("x"), {"k": np.zeros(2, np.float64)}, "'k' has dtype float64"),
        (record_of("x"), {"k": np.zeros(2, ">f4")}, "'k' has dtype >f4"),
        (record_of("x"), {"__metadata__": np.zeros(2, np.int8)}, "__metadata__"),
        (replace(record_of("x"), key=b"short"), {}, "key and place"),
        (replace(record_of("x"), tokens=b""), {}, "tokens"),
        (replace(record_of("x"), tokens=b"12345"), {}, "tokens"),
        (replace(record_of("x"), local_start=2**40), {}, "local_start"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(store: DiskStore, record: object, arrays: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        store.write(record, arrays)
    assert store.stats().entries == 0 and adds_up(store)


def test_an_entry_is_written_once(store: DiskStore) -> None:
    size = put(store, "x")
    before = path_of(store, "x").stat().st_ino
    assert put(store, "x") == size
    assert path_of(store, "x").stat().st_ino == before and store.stats().writes == 1


def test_an_entry_whose_file_is_gone_or_cut_is_written_again(store: DiskStore) -> None:
    put(store, "gone", "cut")
    path_of(store, "gone").unlink()
    os.truncate(path_of(store, "cut"), 100)
    put(store, "gone", "cut")
    assert holds(store, "gone") and holds(store, "cut") and adds_up(store)


def test_an_entry_with_another_record_takes_the_place_of_the_first(store: DiskStore) -> None:
    put(store, "x")
    record = replace(record_of("x"), meta=b"a longer note", lossy=True)
    store.write(record, arrays_of(record.key))
    assert (
        store.find(record.key) == record
        and same(read_entry(store, record.key), arrays_of(record.key))
        and adds_up(store)
    )


def test_children_are_radix_entries_of_one_place_and_first_token(store: DiskStore) -> None:
    put(store, "a", "b", place="p", first=7)
    put(store, "c", place="p", first=8)
    put(store, "d", place="q", first=7, provenance="dependency")
    put(store, "e", place="p", first=7, provenance="approximate")
    put(store, "f", place="p", first=-7)
    assert continued(store, "a", "b", "c", "f", place="p") and continued(store, "d", place="q")
    assert [one.key for one in store.children(digest("p"), begins(8))] == [digest("c")]
    assert [one.key for one in store.children(digest("q"), begins(7))] == [digest("d")]
    assert [one.key for one in store.children(digest("p"), begins(-7))] == [digest("f")]
    assert list(store.children(digest("q"), begins(8))) == [] == list(store.children(digest("nowhere"), begins(7)))
    assert store.find(digest("e")).provenance == "approximate"
    store.forget(digest("a"))
    assert [one.key for one in store.children(digest("p"), begins(7))] == [digest("b")]
    assert store.find(digest("a")) is None and adds_up(store)


@pytest.mark.parametrize("seed", range(3))
def test_of_many_children_one_begins_with_most(store: DiskStore, seed: int) -> None:
    """Few ids, so that many agree in several tokens; 300 comes before 2 in the order of bytes."""
    random = np.random.default_rng(seed)
    made = [np.append(7, random.choice([2, 300], random.integers(1, 9))).astype("<i4").tobytes() for _ in range(60)]
    with store._index.change() as index:
        for i, tokens in enumerate(made):
            index.add(Record(digest(i), digest("p"), tokens, "causal", "prefix", 0), 1, i)
    for asked in (*made, *(np.append(7, random.choice([2, 300, 5], 9)).astype("<i4").tobytes() for _ in range(60))):
        most = max(common_prefix(tokens, asked) for tokens in made)
        found = store.children(digest("p"), asked)
        assert len(found) <= 2 and max(common_prefix(one.tokens, asked) for one in found) == most


def test_questions_wait_for_no_writer(tmp_path: Path, store: DiskStore) -> None:
    put(store, "x")
    with open_store(tmp_path) as other, other._index.change() as index:
        index.drop(digest("x"))
        assert store.find(digest("x")) == record_of("x")
        assert list(store.children(digest("root"), begins(7))) == [record_of("x")]
        store.touch([digest("x")])
        assert same(read_entry(store, digest("x")), arrays_of(digest("x")))
        assert store.stats().failed == 0


def test_what_one_process_writes_another_finds(tmp_path: Path, store: DiskStore) -> None:
    with open_store(tmp_path) as other:
        put(other, "x")
        assert holds(store, "x")
        store.forget(digest("x"))
        assert not holds(other, "x")
