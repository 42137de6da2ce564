"""Measurements. A module here, or a room that can be run, is a command: `python -m benchmarks.NAME`.

Commands import rooms and never each other; `docs/benchmarks.md` lists them.
"""
