"""Replacement policies: requests, the simulator, bounds. Run: `python -m benchmarks.policies`."""
