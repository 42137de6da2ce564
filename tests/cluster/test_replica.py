"""What a replica asks its cluster for, and what it finds on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragjax.cluster.replica import check_room, load, needs
from ragjax.core import ConfigError, EngineOptions, StorageOptions
from ragjax.engine import Engine
from tests.support.disks import arrays_of, digest, open_store, path_of, put, read_entry, same

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

    def opening(options: EngineOptions, *, early: bool) -> None:
        assert early, "a replica answers while its programs are made, as a server does"
        opened.append(options)

    monkeypatch.setattr(Engine, "load", opening)
    for rank in range(2):
        load(EngineOptions("tiny", storage=StorageOptions(disk=tmp_path)), rank)
        assert opened[rank].storage.disk == tmp_path / f"replica-{rank}"
        with open_store(tmp_path / f"replica-{rank}") as own:
            assert same(read_entry(own, digest("fused")), arrays_of(digest("fused")))
            assert path_of(own, "fused").samefile(path_of(alone, "fused")), "it takes no room of its own"
            own.forget(digest("fused"))
    with open_store(tmp_path) as alone:
        assert not alone.verify() and alone.find(digest("fused")), "what a replica drops is its own"
    load(EngineOptions("tiny"), 0)  # without a disk there is nothing to do


def test_a_folder_that_cannot_be_written_costs_hits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(tmp_path) as alone:
        put(alone, "fused")
    (tmp_path / "replica-0").write_text("a file stands where the folder is to be")
    monkeypatch.setattr(Engine, "load", lambda options, *, early: options)
    load(EngineOptions("tiny", storage=StorageOptions(disk=tmp_path)), 0)
    assert f"not all that {tmp_path} holds can be used" in caplog.text
