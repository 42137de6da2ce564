"""Programs on several virtual CPU devices, in processes of their own: JAX settles the number when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def assert_agreement(program: str, devices: int, timeout: float = 240) -> None:
    """Run the program on so many devices; it has to end by printing that they agree, within `timeout` seconds."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"agree on {devices} devices"


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """JAX's own compilation cache, which is the suite's, is off."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
