"""Questions of the demo."""

from __future__ import annotations

import json

from ragjax.commands.flags import DEMO


def questions(limit: int) -> list[str]:
    """Demo questions that find different documents."""
    lines = (DEMO / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(line)["question"] for line in lines]
    return chosen[:: max(1, len(chosen) // limit)][:limit]
