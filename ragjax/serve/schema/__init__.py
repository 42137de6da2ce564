"""Bodies of requests, in the form of OpenAI's API reference, and what they ask of the engine.

A value of another type is an error. Null counts as absent: each field that may be left out takes it; `rag: null` alone
says more. What happens to unknown fields, `ignored_fields.py` says; in `rag` and in bodies about vector stores they are
errors.
"""
