"""ragjax as a server under load: `python -m benchmarks.baseline` with the settings of a system."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.samples import STORE
from benchmarks.load.client import Delivery
from benchmarks.load.server import Body, Server
from benchmarks.load.system import served
from benchmarks.load.workload import Ask, Workload
from ragjax.commands.options import FLAGS, STORAGE
from ragjax.core import EngineOptions


class OwnServer(Server):
    """Our server, over chat completions. Answers end where the model ends them: HTTP has no way to go on."""

    path = "/v1/chat/completions"

    def __init__(self, name: str, options: EngineOptions, workload: Workload):
        super().__init__(name)
        self._options, self._workload = options, workload
        self._found: dict[str, Any] = served(options, options.strategy or "contract")

    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        """The command line, all options of the engine as flags."""
        words: list[str | Path] = [sys.executable, "-m", "benchmarks.baseline", "--port", str(port)]
        for field, (flag, settings) in FLAGS.items():
            owner = self._options.storage if field.startswith(STORAGE) else self._options
            value = getattr(owner, field.removeprefix(STORAGE))
            if settings.get("action") == "store_true":
                words += [flag] if value else []
            elif isinstance(value, tuple):
                words += [word for one in value for word in (flag, str(one))]
            elif value is not None and field not in ("knowledge", "graph"):
                words += [flag, str(value)]
        return [*words, "--knowledge", self._knowledge()], {}

    def _knowledge(self) -> str:
        """The documents as a file that the server reads; its name is the knowledge base's."""
        if not self._workload.documents:
            return "none"
        file = STORE / f"{self._workload.knowledge}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": d.id, "title": d.title, "text": d.text}) for d in self._workload.documents)
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def body(self, ask: Ask) -> Body:
        """A streamed chat completion."""
        rag: dict[str, Any] = {}
        if ask.paths is not None:
            rag |= {"graph": {"relation_paths": [list(path) for path in ask.paths]}, "strategy": self._options.strategy}
        elif ask.documents is not None:
            rag["documents"] = list(ask.documents)
        elif self._workload.documents:
            rag["top_k"] = ask.top_k
        return {
            "model": str(self._options.model),
            "messages": [{"role": "user", "content": ask.question}],
            "max_tokens": ask.output,
            "stream": True,
            "stream_options": {"include_usage": True},
            "rag": rag,
        }

    def delivery(self, event: Body) -> Delivery | None:
        """Text, or the sums at the end."""
        usage = event.get("usage")
        if usage is not None:
            found = usage["prompt_tokens_details"]["cached_tokens"]
            return Delivery(True, usage["completion_tokens"], usage["prompt_tokens"], found)
        said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        return Delivery(text=said) if said else None

    @property
    def served(self) -> dict[str, Any]:
        """How it serves."""
        return self._found
