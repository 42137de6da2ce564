"""Attention kernels: masks, correctness, speed. Run: `python -m benchmarks.kernels`."""
