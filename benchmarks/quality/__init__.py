"""How good answers are: question sets, scores, and every strategy on one set. Run: `python -m benchmarks.quality`."""
