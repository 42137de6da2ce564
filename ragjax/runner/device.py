"""The device that JAX computes on, and where its compiled programs are kept."""

from __future__ import annotations

from pathlib import Path

import jax


def platform() -> str:
    """Kind of the default device: cpu or gpu."""
    return jax.default_backend()


def use_compilation_cache(directory: Path) -> None:
    """Keep compiled programs on disk, so that a second start does not compile."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(directory / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
