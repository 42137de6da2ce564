"""Attention over pages of KV: one op, one file for each backend."""
