"""Prompts made of messages, chunks and facts."""
