"""What a replica asks its cluster for."""

from __future__ import annotations

import pytest

from ragjax.cluster.replica import check_room, needs
from ragjax.core import ConfigError

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
