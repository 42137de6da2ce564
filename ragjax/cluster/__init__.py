"""Replicas of one engine behind one front (docs/scale.md)."""
