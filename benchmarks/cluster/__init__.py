"""`python -m benchmarks.cluster`: routers of many replicas, simulated."""
