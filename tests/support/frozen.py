"""Behaviour that must not change: answers of six strategies, the HTTP description, metrics, and folders on disk.

    python -m tests.support.frozen [answers] [openapi] [metrics] [folders]

writes what the code at hand does into tests/data/freeze; `tests/house/test_freeze.py` compares with it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from ragjax import Answer, Document, Engine, Graph, Kind, Message, Prompt, Segment, StorageOptions
from ragjax.engine.preprocessing import preprocess
from ragjax.retrieval.triples import Triple
from ragjax.serve.app import create_app
from tests.support.audit import audit_engine

DATA = Path(__file__).parents[1] / "data"
HOME = DATA / "freeze"
STRATEGIES = ("full", "prefix", "naive", "craft", "anchor", "dependency")
TOKENS = 8
CLOSE = 5e-4
"""Nats between the two likeliest tokens, below which their order may depend on the machine."""

DOCUMENTS = tuple(
    Document(f"d{i}", text, title)
    for i, (title, text) in enumerate(
        {
            "Keeper": "Maud Pellinger keeps the lighthouse of Candlehythe. She lights it at dusk.",
            "Ferry": "The ferry to Orlan leaves at nine from the old pier, and at noon on Sundays.",
            "Baker": "Harrow bakes lamp bread of rye and honey for the keeper.",
            "Honey": "Gorsewell honey is dark, and it is sold at the pier.",
            "Gale": "The great gale of 1871 broke the pier and the lamp.",
            "Tern": "Silver terns nest on Thimble Rock in spring.",
            "Bridge": "The bridge costs threepence, and a goat goes free.",
            "Mine": "Slate from the mine roofs every house of Stonnick.",
        }.items()
    )
)
QUESTIONS = (
    "Who keeps the lighthouse?",
    "When does the ferry leave?",
    "What does Harrow bake?",
    "Where is honey sold?",
    "What broke the pier?",
)
TRIPLES = tuple(
    Triple(*fields)
    for fields in (
        ("Tolverey", "capital", "Candlehythe"),
        ("Tolverey", "lies in", "Ambrel Sea"),
        ("Candlehythe", "has", "lighthouse"),
        ("lighthouse", "kept by", "Maud Pellinger"),
        ("Maud Pellinger", "dog", "Pepper"),
        ("Pepper", "barks at", "silver tern"),
        ("Candlehythe", "ferry to", "Orlan"),
        ("Orlan", "known for", "honey"),
    )
)
ABOUT = (("Tolverey",), ("Candlehythe",), ("Maud Pellinger",), ("Candlehythe", "Pepper"), ("Orlan", "Tolverey"))


def model(folder: Path) -> Path:
    """The tiny Llama with sharper attention, room for 2,048 tokens, and a tokenizer of single characters."""
    folder.mkdir(parents=True)
    shutil.copytree(DATA / "disk" / "tokenizer", folder, dirs_exist_ok=True)
    config = json.loads((DATA / "tiny_llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048, "eos_token_id": 0}))
    weights = load_file(DATA / "tiny_llama" / "model.safetensors")
    sharp = {name: w * 3 if "q_proj" in name or "k_proj" in name else w for name, w in weights.items()}
    save_file(sharp, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: Any) -> Engine:
    given = {"storage": StorageOptions(host_gb=0.0)} | options  # how much memory is free is no part of it
    return Engine.load(
        folder, dtype="float32", device_cache_gb=0.02, compile=False, progress=False, max_context=2048, **given
    )


# ------------------------------------------------------------------------------------------- answers

Ask = Callable[[Engine, str, dict[str, int]], Answer]
"""Asks a question by a strategy, with fields of `Sampling`."""


def _tokens(name: str, n: int) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(2, 97, n).astype(np.int32)


def _segment(name: str, kind: Kind, n: int, depends: tuple[int, ...] | None = None) -> Segment:
    return Segment(name, kind, _tokens(name, n), title=name, depends=depends)


def _of_prompt(prompt: Prompt, tenant: str = "") -> Ask:
    return lambda engine, strategy, sampling: engine.answer_prompt(prompt, strategy=strategy, tenant=tenant, **sampling)


def _about(question: str, **options: Any) -> Ask:
    return lambda engine, strategy, sampling: engine.answer(question, strategy=strategy, **options, **sampling)


def linear() -> list[Ask]:
    """Forty questions over chunks: of segments, of documents given, and of the knowledge base; cold and warm."""
    random = np.random.default_rng(11)
    asks: list[Ask] = []
    lengths = (33, 48, 21, 64, 17, 40, 90)
    for i in range(24):
        if i in (7, 15):
            asks.append(asks[i - 2])  # the same prompt again
            continue
        chosen = random.choice(len(lengths), int(random.integers(2, 5)), replace=False)
        system = _segment(f"system{i // 12}", Kind.SYSTEM, (19, 37)[i // 12])
        chunks = [_segment(f"chunk{c}", Kind.CHUNK, lengths[c]) for c in chosen]
        question = _segment(f"question{i % 5}", Kind.QUERY, 9 + i % 5)
        asks.append(_of_prompt(Prompt((system, *chunks, question)), "acme" if i % 8 == 6 else ""))
    for i in range(16):
        question = QUESTIONS[i % len(QUESTIONS)]
        if i % 4 == 3:
            asks.append(_about(question, documents=[DOCUMENTS[(i + j) % 5] for j in range(3)]))
        else:
            asks.append(_about(question, top_k=2 + i % 2))
    return asks


def trees() -> list[Ask]:
    """Forty questions over trees of nodes: of segments, of relation paths given, and of the knowledge graph."""
    random = np.random.default_rng(12)
    asks: list[Ask] = []
    for i in range(20):
        segments = [_segment(f"system{i // 10}", Kind.SYSTEM, (19, 37)[i // 10])]
        for tree in random.choice(5, int(random.integers(2, 4)), replace=False):
            root = len(segments)
            segments.append(_segment(f"root{tree}", Kind.NODE, 12 + tree))
            for branch in range(2 + tree % 2):
                segments.append(_segment(f"branch{tree}{branch}", Kind.NODE, 7 + 3 * branch, (root,)))
        asks.append(_of_prompt(Prompt((*segments, _segment(f"question{i % 5}", Kind.JOIN, 9))), "acme" * (i % 8 == 6)))
    paths = (
        ("Orlan", "known for", "honey", "sold at", "pier"),
        ("Orlan", "known for", "honey", "colour", "dark"),
        ("Stonnick", "roofs", "slate"),
    )
    for i in range(20):
        question = QUESTIONS[i % len(QUESTIONS)]
        if i % 5 == 4:
            asks.append(_about(question, graph=Graph(relation_paths=paths[: 1 + i % 3])))
        else:
            asks.append(_about(question, graph=Graph(entities=ABOUT[i * 3 % len(ABOUT)], hops=1 + i % 3, paths=4)))
    return asks


def record(answer: Answer) -> list[Any]:
    """Tokens, to what the answer is exact, and of each segment its tokens, those reused and those recomputed."""
    segments = [[s.tokens, s.reused, s.recomputed] for s in answer.segments]
    return [list(answer.tokens), answer.exact_to, segments]


def answers(engine: Engine, strategy: str, **sampling: int) -> list[Answer]:
    """The strategy's answers to its forty questions, from an empty cache."""
    engine.clear_cache()
    asks = trees() if strategy == "dependency" else linear()
    done = []
    for i, ask in enumerate(asks):
        if strategy == "anchor" and i == 30:  # those before meet chunks without neighbours
            preprocess(engine, n=2, progress=False)  # a third is a near tie that machines round otherwise
        if i == 20 and strategy != "anchor":
            engine.clear_cache()  # cold once more
        done.append(ask(engine, strategy, {"max_tokens": TOKENS, **sampling}))
    audit_engine(engine)
    return done


def prepared(folder: Path, **options: Any) -> Engine:
    """An engine that knows documents and facts."""
    engine = load(folder, **options)
    engine.add_documents(DOCUMENTS)
    engine.add_triples(TRIPLES)
    return engine


def write_answers(folder: Path) -> None:
    """A line an answer: its record, and how far the likeliest token was ahead of the second at each place."""
    with prepared(folder) as engine, prepared(folder) as telling:
        text = {}
        for strategy in STRATEGIES:
            told = answers(telling, strategy, logprobs=2)
            plain = answers(engine, strategy)
            rows = []
            for answer, twin in zip(plain, told, strict=True):
                assert record(answer) == record(twin), "an answer with log-probabilities is another one"
                ahead = [round(t.top[0][2] - t.top[1][2], 5) for t in twin.logprobs]
                rows.append(json.dumps([*record(answer), ahead], separators=(",", ":")))
            text[strategy] = "[\n" + ",\n".join(rows) + "\n]"
    body = ",\n".join(f'"{name}": {rows}' for name, rows in text.items())
    (HOME / "answers.json").write_text("{\n" + body + "\n}\n")


def differences(found: Sequence[list[Any]], stored: Sequence[list[Any]]) -> list[str]:
    """What differs from the stored answers. Tokens count up to the first whose order may depend on the machine."""
    out = []
    if len(found) != len(stored):
        out.append(f"{len(found)} answers in place of {len(stored)}")
    for i, (now, before) in enumerate(zip(found, stored, strict=False)):
        tokens, exact_to, segments, ahead = before
        sure = next((n for n, nats in enumerate(ahead) if nats < CLOSE), len(ahead))
        if now[0][:sure] != tokens[:sure] or (sure == len(ahead) and len(now[0]) != len(tokens)):
            out.append(f"{i}: tokens {now[0]} in place of {tokens}")
        if now[1] != exact_to:
            out.append(f"{i}: exact_to {now[1]} in place of {exact_to}")
        if now[2] != segments:
            out.append(f"{i}: segments {now[2]} in place of {segments}")
    return out


# ---------------------------------------------------------------------------------- description, metrics


async def _served(engine: Engine) -> tuple[dict[str, Any], str]:
    app = create_app(engine)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://frozen") as client:
        for strategy in ("prefix", "naive"):
            body = {
                "model": engine.model_name,
                "messages": [{"role": "user", "content": QUESTIONS[0]}],
                "max_tokens": 3,
            }
            (await client.post("/v1/chat/completions", json=body | {"rag": {"strategy": strategy}})).raise_for_status()
        description = (await client.get("/openapi.json")).raise_for_status().json()
        return description, (await client.get("/metrics")).raise_for_status().text


def described(engine: Engine) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The HTTP description without its prose, and of each metric the names of its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    description, text = asyncio.run(_served(engine))
    families = text_string_to_metric_families(text)
    labels = {family.name: sorted({name for s in family.samples for name in s.labels}) for family in families}
    return without_prose(description), labels


def without_prose(tree: Any) -> Any:
    """The same without descriptions."""
    if isinstance(tree, dict):
        kept = {key: child for key, child in tree.items() if key != "description" or not isinstance(child, str)}
        return {key: without_prose(child) for key, child in kept.items()}
    return [without_prose(child) for child in tree] if isinstance(tree, list) else tree


def leaves(tree: Any, at: str = "") -> dict[str, Any]:
    """The tree's values by their paths."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, child in tree.items() for k, v in leaves(child, f"{at}/{key}").items()}
    if isinstance(tree, list) and tree:
        return {k: v for i, child in enumerate(tree) for k, v in leaves(child, f"{at}/{i}").items()}
    return {at: tree}


def changed(now: Any, before: Any) -> str:
    """What appeared, vanished or changed, a line each; empty if nothing did."""
    new, old = leaves(now), leaves(before)
    lines = [f"appeared: {path}" for path in new if path not in old]
    lines += [f"vanished: {path}" for path in old if path not in new]
    lines += [
        f"changed: {path}: {old[path]!r} is now {new[path]!r}" for path in new if path in old and new[path] != old[path]
    ]
    return "\n".join(lines)


def write_openapi(folder: Path) -> None:
    with prepared(folder) as engine:
        (HOME / "openapi.json").write_text(json.dumps(described(engine)[0], indent=1, sort_keys=True) + "\n")


def write_metrics(folder: Path) -> None:
    with prepared(folder) as engine:
        rows = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(described(engine)[1].items())]
        (HOME / "metrics.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


# --------------------------------------------------------------------------------------------- folders


NOTES = tuple(
    Document(f"n{i}", text)
    for i, text in enumerate(
        ("Maud keeps the lamp.", "The ferry leaves at nine.", "Honey is sold here.", "A tern nests.")
    )
)
BRIEF = "Be brief."


def _chat(question: str, **options: Any) -> Ask:
    messages = (Message("system", BRIEF), Message("user", question))
    return lambda engine, strategy, sampling: engine.answer(messages, strategy=strategy, **options, **sampling)


KEPT: tuple[tuple[str, Ask], ...] = (
    ("prefix", _chat("Who has the lamp?", knowledge="harbour", documents=["n0", "n2"])),
    ("naive", _chat("When does it leave?", knowledge="harbour", top_k=2)),
    ("craft", _chat("Is honey sold?", knowledge="harbour", top_k=2)),
    ("anchor", _chat("What nests?", knowledge="harbour", top_k=2)),
    ("dependency", _chat("Where?", graph=Graph("facts", entities=ABOUT[1], hops=2, paths=3))),
    ("prefix", _chat("Who has the lamp?", knowledge="harbour", top_k=1, tenant="acme")),
)
"""What the folders were written by, and is asked of them."""


@dataclass(frozen=True)
class Kept:
    """What an engine made of the folders. facts: those of the graph that an answer was given."""

    unchanged: int
    found: list[str]
    answers: list[list[Any]]
    tiers: list[list[str | None]]
    facts: list[list[str]]


def ask_kept(folder: Path, home: Path) -> Kept:
    """Open the folders, and ask what was asked when they were written."""
    with load(folder, **kept_in(home)) as engine:
        report = engine.add_documents(NOTES[:1], "harbour")  # which opens it: the others are there
        engine.add_triples(TRIPLES[:1], "facts")
        found = [hit.chunk.id for hit in engine.search("Who keeps the lamp?", knowledge="harbour", top_k=4)]
        answers = [ask(engine, strategy, {"max_tokens": TOKENS}) for strategy, ask in KEPT]
        audit_engine(engine)
    return Kept(
        report.unchanged,
        found,
        [record(answer) for answer in answers],
        [[segment.tier for segment in answer.segments] for answer in answers],
        [[*fact.steps] for answer in answers for fact in answer.facts],
    )


def kept_in(home: Path) -> dict[str, Any]:
    """Options of an engine that keeps entries, indexes and graphs there."""
    storage = StorageOptions(disk=home / "cache", disk_gb=1.0, host_gb=0.0)
    return {"storage": storage, "index_dir": home / "index"}


def write_folders(folder: Path) -> None:
    """The folders, and beside them what an engine makes of them."""
    home = HOME / "folders"
    shutil.rmtree(home, ignore_errors=True)
    with load(folder, **kept_in(home)) as engine:
        engine.add_documents(NOTES, "harbour")
        engine.add_triples(TRIPLES, "facts")
        preprocess(engine, "harbour", n=1, system=BRIEF, progress=False)
        for strategy, ask in KEPT:
            ask(engine, strategy, {"max_tokens": TOKENS})
    with tempfile.TemporaryDirectory() as scratch:
        kept = ask_kept(folder, shutil.copytree(home, Path(scratch) / "folders"))
    (HOME / "folders.json").write_text(json.dumps(asdict(kept), indent=1) + "\n")


WRITERS = {"answers": write_answers, "openapi": write_openapi, "metrics": write_metrics, "folders": write_folders}


def main(names: Iterable[str]) -> None:
    HOME.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = model(Path(scratch) / "tiny")
        for name in list(names) or WRITERS:
            WRITERS[name](folder)


if __name__ == "__main__":
    main(sys.argv[1:])
