"""Client packages as they are, against a server: one task each. `docs/clients.md` lists what was tried.

openai runs here, also against an engine in miniature. The others run in a Python that has them, which
RAGJAX_CLIENTS_PYTHON names.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.support import client_program, stuff_program, tiny
from tests.support.fakes import FakeEngine
from tests.support.outside import python_of, run
from tests.support.serving import TEXT, serving
from tests.support.stuffed import DOCUMENTS

TOKENS = {
    "chat": ("The", " light", "house", " is", " red", "."),
    "stream": ("The", " light", "house", " is", " red", "."),
    "responses": ("The", " light", "house", " is", " red", "."),
    "parse": ('{"name": "Ghent", ', '"people": 3}'),
    "tools": ('{"name": "weather", ', '"arguments": {"city": "Ghent"}}'),
    "embed": (),
}
EXPECTED: dict[str, Any] = {
    "chat": TEXT,
    "stream": TEXT,
    "responses": TEXT,
    "parse": {"name": "Ghent", "people": 3},
    "tools": {"city": "Ghent"},
    "embed": [[1.0, 0.0, 1.0], [3.0, 1.0, 1.0]],
}
MODULES = {
    "openai": ("openai", ("chat", "stream", "parse", "tools", "embed", "responses")),
    "agents": ("agents", ("tools", "responses")),
    "anthropic": ("anthropic", ("chat", "stream", "tools")),
    "langchain": ("langchain_openai", ("chat", "stream", "parse", "tools", "embed", "responses")),
    "pydantic_ai": ("pydantic_ai", ("chat", "stream", "parse", "tools", "responses")),
    "instructor": ("instructor", ("parse", "tools")),
    "litellm": ("litellm", ("chat", "stream", "parse", "tools", "embed", "responses")),
    "llama_index": ("llama_index.llms.openai_like", ("chat", "stream", "parse", "tools", "embed")),
    "haystack": ("haystack", ("chat", "stream", "parse", "tools", "embed")),
}
TASKS = [(client, task) for client, (_, tasks) in MODULES.items() for task in tasks]


@pytest.mark.parametrize(("client", "task"), TASKS, ids=lambda name: name)
def test_a_client_in_its_own_environment(client: str, task: str) -> None:
    there = f"import importlib.util as u, sys; sys.exit(u.find_spec('{MODULES[client][0]}') is None)"
    python = python_of("RAGJAX_CLIENTS_PYTHON", there)
    with serving(FakeEngine(tokens=TOKENS[task])) as served:
        done = run(python, client_program.__file__, client, task, served.url + "/v1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == EXPECTED[task]


@pytest.mark.parametrize("task", ["chat", "stream", "parse", "tools", "embed"])
def test_the_ai_sdk_of_vercel(task: str) -> None:
    """A script of node, with the packages ai, @ai-sdk/openai-compatible and zod."""
    modules, node = os.environ.get("RAGJAX_CLIENTS_NODE_MODULES"), shutil.which("node")
    if not modules or node is None:
        pytest.skip("RAGJAX_CLIENTS_NODE_MODULES names no folder of node packages, or there is no node")
    program = Path(client_program.__file__).with_name("client_program.mjs")
    with serving(FakeEngine(tokens=TOKENS[task])) as served:
        done = run(node, str(program), task, served.url + "/v1", modules)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == EXPECTED[task]


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    old: bool


def test_openai_against_an_engine_in_miniature() -> None:
    """parse, a required call and the answer to it, a batch of token ids, several choices, an embedding."""
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {**Cat.model_json_schema()}}}
    asked: Any = {"model": "tiny", "temperature": 1.5, "seed": 3, "messages": [{"role": "user", "content": "Hi"}]}
    with tiny.engine() as engine, serving(engine) as served:
        client = served.client(timeout=120)
        assert isinstance(client.chat.completions.parse(**asked, response_format=Cat).choices[0].message.parsed, Cat)
        choice = client.chat.completions.create(**asked, tools=[tool], tool_choice="required").choices[0]
        (call,) = choice.message.tool_calls
        assert Cat.model_validate_json(call.function.arguments) and choice.finish_reason == "tool_calls"
        told: Any = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        again = {**asked, "messages": [*asked["messages"], choice.message, told], "max_tokens": 3}
        assert client.chat.completions.create(**again, tools=[tool]).usage.completion_tokens == 3
        batch = client.completions.create(model="tiny", prompt=[[65, 66], [67]], n=2, max_tokens=3)
        assert batch.usage.prompt_tokens == 3 and batch.choices[0].text == batch.choices[1].text
        assert len(client.embeddings.create(model=engine.embedding_model, input="a").data[0].embedding) == 32


@pytest.mark.parametrize("chain", ["stuff", "system"])
def test_passages_that_langchain_puts_into_messages_are_warm(chain: str) -> None:
    """Over FAISS, in its own environment; nothing is set but base URL and model."""
    python = python_of("RAGJAX_CLIENTS_PYTHON", stuff_program.NEEDS)
    with tiny.engine(strategy="moved") as engine, serving(engine) as served:
        done = run(python, stuff_program.__file__, chain, served.url + "/v1", input=json.dumps(DOCUMENTS))
        assert done.returncode == 0, done.stderr[-3000:]
        cached, *later = json.loads(done.stdout.splitlines()[-1])
    assert cached == 0
    whole = sum(map(len, DOCUMENTS))
    assert len(later) == 2 and min(later) > 0.8 * whole, "most of every passage is warm from the second question on"
