"""Reductions over attention that selection methods use, and their backends."""
