"""The properties of a device that kernels depend on."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Device:
    """platform: "cpu", "gpu" or another of JAX's; capability: CUDA compute capability, (0, 0) where there is none."""

    platform: str
    capability: tuple[int, int] = (0, 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block of threads may have (CUDA C++ Programming Guide, technical specifications).

        Where there is no GPU, kernels are interpreted or lowered as for Hopper.
        """
        if self.platform != "gpu" or self.capability[0] in (9, 10):
            return 227 * 1024
        return (163 if self.capability in ((8, 0), (8, 7)) else 99) * 1024

    @staticmethod
    def of(device: jax.Device) -> Device:
        major, _, minor = str(getattr(device, "compute_capability", "0.0")).partition(".")
        return Device(device.platform, (int(major), int(minor or 0)))

    def lacks(self, least: tuple[int, int]) -> str | None:
        if self.platform != "gpu":
            return f"it runs on GPUs, not on {self.platform}"
        if self.capability < least:
            have, need = (".".join(map(str, x)) for x in (self.capability, least))
            return f"it needs compute capability {need}, the device has {have}"
        return None

    def lacks_shared(self, need: int) -> str | None:
        if need <= self.shared_bytes:
            return None
        return f"a program takes {need} bytes of shared memory, the device has {self.shared_bytes}"
