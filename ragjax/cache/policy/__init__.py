"""Replacement policies, one file each."""
