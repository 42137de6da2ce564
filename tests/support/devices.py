"""Programs on several virtual CPU devices, in processes of their own: JAX settles the number when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
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
