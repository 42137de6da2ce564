"""Compiled programs over the page pool."""
