"""A complete engine in miniature: random decoder, byte tokenizer, hashed embeddings. For tests of everything above."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from benchmarks.baseline.strategy import all_strategies
from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Storage
from ragjax.cache.policy.base import make_policy
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.core import (
    Answer,
    AtRest,
    Compression,
    Embedded,
    EngineOptions,
    Grid,
    Prompt,
    Request,
    RowShape,
    Segment,
    StorageOptions,
)
from ragjax.core import Kind as SegmentKind
from ragjax.core.prompt import Keep
from ragjax.engine import Engine
from ragjax.engine.build import DTYPE_BYTES, Parts
from ragjax.engine.knowledge import Knowledge
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import Decoder
from ragjax.models.executables import Executables
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.tokenizer_files import TOKEN_FLAGS
from ragjax.quality.contract import Contract
from ragjax.quality.report import Setting
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.registry import KnowledgeRegistry
from ragjax.reuse.base import Strategy
from ragjax.runner.runner import Runner
from ragjax.runner.supply import Supply
from ragjax.store.disk import DiskStore
from ragjax.store.shared import SharedTier
from ragjax.store.transfer import KVTransfer
from tests.support.audit import audit_engine

CONFIG = ModelConfig(
    family="llama", vocab_size=260, hidden_size=48, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, rope_theta=10000.0, rope_scaling=None, norm_eps=1e-5, tie_embeddings=True, qkv_bias=False,
    qk_norm=False, context_length=1024, eos_ids=(257,), bos_id=None,
)  # fmt: skip
ROWS = (RowShape(2, 2), RowShape(4, 1), RowShape(16, 8), RowShape(64, 16))
GRID = Grid(rows=ROWS, entries=(320,), logits=(2, 4))
PAGE = 16

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def decoder(dtype: str = "float32", config: ModelConfig = CONFIG, seed: int = 0) -> Decoder:
    """Random weights, scaled up so that attention is far from uniform."""
    made = Decoder(config, jnp.dtype(dtype), rngs=nnx.Rngs(seed))
    for layer in made.layers:
        layer.qkv.set_value(layer.qkv[...] * 3)
    return made


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and three control tokens."""
    alphabet = _byte_alphabet()
    special = {"<|start|>": 256, "<|end|>": 257, "<|pad|>": 258}
    form = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **TOKEN_FLAGS} for text, i in special.items()],
        "normalizer": None, "pre_tokenizer": form, "post_processor": None, "decoder": form,
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(alphabet)} | special, "merges": []},
    }  # fmt: skip
    return Tokenizer(definition, special={"eos_token": 257}, eos_ids=(257,), add_bos=False, chat_template=TEMPLATE)


def _byte_alphabet() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


class HashedEncoder:
    """Embeds a text as the sum of its words' hashes."""

    identity = "hashed"
    dim = 32
    max_tokens = None

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        """float32 [n, 32], rows of length one."""
        out: NDArray[np.float32] = np.zeros((len(texts), self.dim), np.float32)
        for i, text in enumerate(texts):
            for word in text.lower().split() or [""]:
                seed = int.from_bytes(hashlib.sha256(word.strip(".,?!").encode()).digest()[:4], "little")
                out[i] += np.random.default_rng(seed).standard_normal(self.dim)
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        return out

    def text_of(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def check(self, texts: Sequence[str]) -> None:
        """Every text will do."""

    def embed(self, texts: Sequence[str]) -> Embedded:
        """Embed texts, and count their words."""
        return Embedded(self.encode(texts), sum(len(text.split()) for text in texts))


class Compiled(Executables):
    """Programs of this process: runners whose programs are equal compile them once. Nothing is written."""

    def __init__(self) -> None:
        self._programs: dict[str, tuple[Any, Any]] = {}
        self.kernels = None  # nor those of the CPU that programs call

    def load(self, key: str, devices: Sequence[jax.Device]) -> tuple[Any, Any] | None:
        return self._programs.get(key)

    def keep(self, key: str, program: Any, beside: Any) -> None:
        self._programs[key] = program, beside


COMPILED = Compiled()


def make_runner(
    made: Decoder | None = None, *, pages: int = 200, grid: Grid = GRID, scanned: bool = True, **options: Any
) -> Runner:
    """A runner of its own. A test that changes what is traced needs another: this one's programs may be there.

    It scans its layers, as on a GPU: that compiles in two thirds of the time. `tests/runner` and tests with real models
    run layers unrolled.
    """
    kept: dict[str, Any] = {"page_size": PAGE, "executables": COMPILED} | options
    return Runner(made or decoder(), pages=pages, grid=grid, scanned=scanned, **kept)


@cache
def runner(dtype: str = "float32", *, pages: int = 200) -> Runner:
    """A runner, shared by all tests: one engine at a time may use it. Its programs are compiled when first used."""
    return make_runner(decoder(dtype), pages=pages)


class Audited(Engine):
    """An engine whose books are clean at the end of its block, if nothing failed in there."""

    def __exit__(self, *failure: object) -> None:
        try:
            if not (self.closed or any(failure)):
                audit_engine(self)
        finally:
            self.close()


def engine(
    made: Runner | None = None,
    *,
    pages: int = 200,
    extra: Sequence[Strategy] = (),
    strategy: str = "prefix",
    policy: str = "lru",
    host_bytes: int = 0,
    disk: DiskStore | None = None,
    shared: SharedTier | None = None,
    at_rest: AtRest = "raw",
    quota: Callable[[str], int | None] = lambda tenant: None,
    contract: Contract | None = None,
    open_graph: Callable[[str], KnowledgeGraph] | None = None,
    identity: bytes = b"",
    load_timeout: float = 10.0,
    supply: Supply | None = None,
    share_knowledge: bool = False,
    keep: Keep = "all",
    **options: Any,
) -> Engine:
    """An engine around a runner (the shared float32 one by default) of which it uses `pages` pages.

    options: fields of `EngineOptions`.
    """
    made = made or runner()
    tokenizer = byte_tokenizer()
    transfer = KVTransfer(made, at_rest, disk=shared or disk)
    profile = Profile((0, 1000), (1, 1000), ((0.01, 1.0), (0.02, 2.0)))
    page_bytes = CONFIG.kv_bytes_per_token(DTYPE_BYTES[made.dtype]) * PAGE
    disk_bytes = 0 if disk is None else disk.stats().max_bytes
    storage = Storage(transfer, page_bytes, host_bytes, shared or disk, quota, shared, disk_bytes)
    tiers = StorageOptions(load_timeout=load_timeout, share_knowledge=share_knowledge)
    parts = Parts(
        model_name="tiny",
        context_length=CONFIG.context_length,
        runner=made,
        tokenizer=tokenizer,
        cache=KnowledgeCache(b"tiny", PagePool(pages, PAGE), make_policy(policy, profile), storage, keep=keep),
        contract=contract or Contract(Setting(strategy), made.dtype),
        strategies=all_strategies() | {s.name: s for s in extra},
        knowledge=knowledge(options.get("index", "flat"), open_graph),
        transfer=transfer,
        disk=disk,
        shared=shared,
        supply=supply,
        compression=None if options.get("compression") is None else Compression.parse(options["compression"]),
        identity=identity,
    )
    return Audited(parts, EngineOptions("tiny", strategy=strategy, storage=tiers, **options))


def knowledge(index: str = "flat", open_graph: Callable[[str], KnowledgeGraph] | None = None) -> Knowledge:
    """Knowledge in memory, of which nothing needs a model."""
    tokenizer = byte_tokenizer()
    return Knowledge(
        KnowledgeRegistry("knowledge base", "rag.knowledge", opener(tokenizer, index)),
        KnowledgeRegistry("knowledge graph", "rag.graph.name", open_graph),
        Chunker(partial(tokenizer.encode, special=False), 64),
        HashedEncoder,
    )


def opener(tokenizer: Tokenizer, index: str = "flat") -> Callable[[str], KnowledgeBase]:
    """Knowledge bases in memory."""

    def open_base(name: str) -> KnowledgeBase:
        return KnowledgeBase(
            None,
            encode_tokens=partial(tokenizer.encode, special=False),
            encoder=HashedEncoder(),
            model_key="tiny",
            max_tokens=64,
            index_kind=index,
            name=name,
        )

    return open_base


def prompt(seed: int = 0, system: int = 20, chunks: Sequence[int] = (40, 33, 57), question: int = 18) -> Prompt:
    """A random prompt: system, chunks, question. Chunks of equal seed and index are equal."""
    random = np.random.default_rng(seed)

    def segment(name: str, kind: SegmentKind, n: int) -> Segment:
        return Segment(name, kind, random.integers(0, 256, n).astype(np.int32), title=name)

    return Prompt(
        (
            segment("system", SegmentKind.SYSTEM, system),
            *(segment(f"chunk{i}", SegmentKind.CHUNK, n) for i, n in enumerate(chunks)),
            segment("question", SegmentKind.JOIN, question),
        )
    )


def answer(engine: Engine, request: Request) -> Answer:
    """The answer to a submitted request."""

    async def run() -> Answer:
        return [event async for event in engine.submit(request) if isinstance(event, Answer)][-1]

    return asyncio.run(run())


def alone(jobs: Sequence[tuple[Prompt, dict[str, Any]]]) -> list[tuple[int, ...]]:
    """Tokens that these prompts get with these options, each in an engine of its own."""
    found = []
    for prompt, options in jobs:
        with engine() as fresh:
            found.append(fresh.answer_prompt(prompt, **options).tokens)
    return found


def check_ended(engine: Engine, futures: Sequence[Future[Answer]]) -> None:
    """Every request that was not cancelled has an answer, the books are clean, and every page comes back."""
    for future in futures:
        if not future.cancelled():
            assert future.result(60).tokens
    audit_engine(engine)
    engine.clear_cache()
    assert engine._cache.pool.free_pages == engine._cache.pool.capacity
