"""How much memory the device has."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Memory:
    """platform: JAX's word for the device. bytes: that it has in all."""

    platform: str
    bytes: int


def device_memory() -> Memory:
    """Of the first device: what its allocator may take; of a CPU, the machine's memory, or the container's limit."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    return Memory(device.platform, int(limit) if limit else _host_bytes())


def _host_bytes() -> int:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        return min(installed, int(_LIMIT.read_text()))
    return installed
