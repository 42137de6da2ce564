"""Divergence of settings from full attention, measured, promised and watched."""
