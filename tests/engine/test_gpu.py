"""On a GPU the engine answers as on a CPU: `pytest -m gpu tests/engine/test_gpu.py` with RAGJAX_TEST_GPU=1.

RAGJAX_TEST_GPU=cpu rehearses it without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# each engine compiles all its programs
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_answers_as_a_cpu(dtype: str, tmp_path: Path) -> None:
    found, other = {}, os.environ["RAGJAX_TEST_GPU"].replace("1", "cuda")
    for platform in ("cpu", other):
        file = tmp_path / f"{platform}.npz"
        command = [sys.executable, "-m", "tests.support.device_program", file, dtype]
        if not file.exists():  # a rehearsal compares the CPU with itself
            subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": platform}, check=True)
        with np.load(file) as arrays:
            found[platform] = {name: arrays[name] for name in arrays.files}
    cpu, gpu = found["cpu"], dict(found[other])
    assert gpu.pop("backends").tolist() in ([["cpu"], ["xla"]] if other == "cpu" else [["triton"]])
    assert cpu.pop("backends").tolist() in (["cpu"], ["xla"])
    assert cpu.keys() == gpu.keys() and len(cpu) > 80
    for name, what in cpu.items():
        if name.endswith("logits"):
            tolerance = 1e-3 if dtype == "float32" else 0.1
            np.testing.assert_allclose(gpu[name], what, rtol=tolerance, atol=tolerance * what.std(), err_msg=name)
        elif dtype == "float32":
            assert gpu[name].tolist() == what.tolist(), name
