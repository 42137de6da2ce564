"""The examples of CONTRIBUTING.md run: a strategy, a policy, an order, an attention backend and a model family."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.cache.policy import POLICIES
from ragjax.cache.policy.base import Access, Victims
from ragjax.cache.tree import Node
from ragjax.core import ConfigError, Document
from ragjax.kernels.attention.op import BACKENDS, Backend, paged_interval_attention
from ragjax.kernels.view import View
from ragjax.models import config, huggingface
from ragjax.models.weights import open_checkpoint
from ragjax.reuse import STRATEGIES
from ragjax.schedule.order import ORDERS, Queue, Waiting
from tests.support import cases, tiny

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def examples(heading: str) -> tuple[str, str]:
    """The file and the registration line below a heading; a family has its lines alone."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return (blocks[0], blocks[-1]) if len(blocks) == 2 else ("", *blocks)


@pytest.fixture
def registries() -> Iterator[None]:
    """What an example registers is known to that test alone."""
    with patch.dict(POLICIES), patch.dict(ORDERS), patch.dict(STRATEGIES):
        yield


def run(heading: str, **names: Any) -> dict[str, Any]:
    """Names that the example's file defines, besides `names`, after its registration ran; `made` is what that gave."""
    code, line = examples(heading)
    exec(compile(code, heading, "exec"), names)
    try:
        names["made"] = eval(line, names)
    except SyntaxError:
        exec(compile(line, heading, "exec"), names)
    return names


@pytest.mark.usefixtures("registries")
def test_the_strategy_repairs_what_it_chooses() -> None:
    run("A strategy")
    engine = tiny.engine()
    try:
        engine.add_documents([Document(f"d{i}", f"The door number {i} is {c}.") for i, c in enumerate(("red", "blue"))])
        asked = [
            engine.answer("Which door?", strategy=name, recompute_ratio=ratio, top_k=2, max_tokens=8)
            for name, ratio in (("newest", 0.0), ("newest", 0.2), ("newest", 1.0), ("full", None))
        ]
    finally:
        engine.close()
    _, part, whole, full = asked  # the first one computes the chunks
    chunks = [segment for segment in part.segments if segment.id.startswith("d")]
    repaired = sum(segment.recomputed for segment in chunks)
    assert part.strategy == "newest" and part.exact_to is None
    assert 0 < repaired < sum(segment.tokens for segment in chunks)
    assert whole.text == full.text


@pytest.mark.usefixtures("registries")
def test_the_policy_drops_the_latest() -> None:
    run("A policy")
    made = POLICIES["mru"]()
    first, second = (Node("", bytes(4 * [i]), None, 0) for i in (1, 2))
    victims = Victims(made)
    for node in (first, second):
        made.on_access(node, Access(True, 1, 0))
        victims.push(node)
    assert victims.pop() is second and victims.pop() is first


@pytest.mark.usefixtures("registries")
def test_the_order_starts_the_shortest_prompt() -> None:
    run("An order")
    queue: Queue[Waiting] = Queue(ORDERS["shortest"]())
    for total in (30, 10, 20):
        queue.add(Waiting(total=total))
    chosen = queue.next()
    assert chosen is not None and chosen.total == 10


def test_the_backend_agrees_with_the_oracle_and_refuses_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = run("An attention backend", BACKENDS=dict(BACKENDS), Backend=Backend)["BACKENDS"]["whole"]
    monkeypatch.setattr("ragjax.kernels.attention.op.BACKENDS", {**BACKENDS, "whole": made})
    case = cases.rich_case(cases.Shape(64, 16, 2, 4, 8, 48))
    shape, layout = case.shape, case.layout
    table = cases.rotation(shape.dim, shape.scaled, shape.max_offset + cases.LOCAL)
    sizes = {"scale": shape.dim**-0.5, "block_rows": shape.block_rows}
    view = View.build(case.rows, layout.pages, layout.layer, layout.entries, table, **sizes)
    out, lse = paged_interval_attention(case.q, view, backend="whole")
    cases.check(case, np.asarray(out), np.asarray(lse))
    many = jnp.zeros((65, *case.q.shape[1:]), case.q.dtype)
    assert "at most 64" in made.refusal(many, view, None)


def test_the_family_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "orchid"
    shutil.copytree(Path(__file__).parents[1] / "data" / "tiny_llama", folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"model_type": "orchid", "architectures": ["OrchidForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="model_type is 'orchid'"):
        open_checkpoint(folder)
    made = run("A model family", **{**vars(config), **vars(huggingface)})
    monkeypatch.setattr(config, "Family", made["Family"])
    monkeypatch.setattr(huggingface, "ARCHITECTURES", made["ARCHITECTURES"])
    assert open_checkpoint(folder).config.family == "orchid"
