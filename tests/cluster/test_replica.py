"""What a replica asks its cluster for, and what it finds on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ragjax.cluster import replica
from ragjax.cluster.replica import check_room, load, needs, take_over
from ragjax.core import ConfigError, EngineOptions, StorageOptions
from ragjax.engine import Engine
from tests.support.disks import arrays_of, digest, open_store, path_of, put, same

FORCED = "--xla_force_host_platform_device_count"


def test_a_replica_takes_as_many_gpus_as_it_has_devices() -> None:
    there = {"CPU": 64.0, "GPU": 8.0}
    assert needs(1, there, "") == {"num_cpus": 1, "num_gpus": 1}
    assert needs(4, there, "--flag") == {"num_cpus": 1, "num_gpus": 4}


@pytest.mark.parametrize("there", [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 0.0}])
def test_without_gpus_its_process_has_virtual_devices(there: dict[str, float]) -> None:
    assert needs(1, there, "--flag") == {"num_cpus": 1}
    for given, made in (("", f"{FORCED}=2"), (f"--flag {FORCED}=8", f"--flag {FORCED}=8 {FORCED}=2")):
        assert needs(2, there, given) == {"num_cpus": 1, "runtime_env": {"env_vars": {"XLA_FLAGS": made}}}


def test_replicas_that_do_not_fit_a_machine_are_one_error() -> None:
    check_room(2, 4, {"CPU": 2.0, "GPU": 8.0})
    check_room(2, 4, {"CPU": 2.0})  # virtual devices share a CPU
    with pytest.raises(ConfigError, match="3 over 4 devices each take 12 GPUs, and this machine has 8"):
        check_room(3, 4, {"CPU": 64.0, "GPU": 8.0})
    with pytest.raises(ConfigError, match="3 take 3 CPUs, and this machine has 2"):
        check_room(3, 1, {"CPU": 2.0})


def test_a_replica_has_on_disk_what_was_computed_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as alone:
        put(alone, "fused")
    opened: list[EngineOptions] = []
    monkeypatch.setattr(Engine, "load", opened.append)
    for rank in range(2):
        load(EngineOptions("tiny", storage=StorageOptions(disk=tmp_path)), rank)
        assert opened[rank].storage.disk == tmp_path / f"replica-{rank}"
        with open_store(tmp_path / f"replica-{rank}") as own:
            assert same(own.read(digest("fused")), arrays_of(digest("fused")))
            assert path_of(own, "fused").samefile(path_of(alone, "fused")), "it takes no room of its own"
            own.forget(digest("fused"))
    with open_store(tmp_path) as alone:
        assert not alone.verify() and alone.find(digest("fused")), "what a replica drops is its own"
    load(EngineOptions("tiny"), 0)  # without a disk there is nothing to do


def test_what_a_replica_has_stays_when_it_takes_over_more(tmp_path: Path) -> None:
    with open_store(tmp_path) as alone, open_store(tmp_path / "replica-0") as own:
        put(alone, "both", "new")
        put(own, "both", "own")
    before = path_of(own, "both").stat().st_ino
    take_over(tmp_path, tmp_path / "replica-0")
    with open_store(tmp_path / "replica-0") as own:
        assert all(own.find(digest(name)) for name in ("both", "new", "own"))
        assert path_of(own, "both").stat().st_ino == before


def test_entries_of_another_format_are_left_out(tmp_path: Path) -> None:
    with open_store(tmp_path) as alone, open_store(tmp_path / "replica-0") as own:
        put(alone, "old")
    manifest = alone.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": ', '"format": 1'))
    take_over(tmp_path, tmp_path / "replica-0")
    assert not path_of(own, "old").exists()


def test_where_there_are_no_links_it_has_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, path: Path) -> None:
        raise PermissionError("the file system has no links")

    with open_store(tmp_path) as alone:
        put(alone, "fused")
    monkeypatch.setattr(os, "link", refuse)
    take_over(tmp_path, tmp_path / "replica-0")
    with open_store(tmp_path / "replica-0") as own:
        assert same(own.read(digest("fused")), arrays_of(digest("fused"))) and not own.stats().set_aside


def test_a_folder_that_cannot_be_written_costs_hits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: Path, path: Path) -> None:
        raise OSError("no space left")

    with open_store(tmp_path) as alone:
        put(alone, "fused")
    monkeypatch.setattr(replica, "_place", refuse)
    take_over(tmp_path, tmp_path / "replica-0")
    assert "no space left" in caplog.text
