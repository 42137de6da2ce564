"""HTTP server: OpenAI's API over an engine, with the account of what was reused.

    python -m ragjax.serve --model smollm2-135m-instruct --knowledge DIR_OR_JSONL

Requests and answers have the shapes of OpenAI's API reference, so its clients work unchanged; the field `rag`
extends both (docs/http.md). What would change the answer and cannot be had is refused by name; what changes nothing is
named in a notice, or refused with --strict (`ignored_fields.py`).
"""
