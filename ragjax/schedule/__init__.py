"""Requests in progress, and whose rows run next."""
