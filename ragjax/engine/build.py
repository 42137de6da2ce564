"""The parts of an engine, made from its options: model, programs, pool, tiers and policies."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.hierarchy import Storage
from ragjax.cache.policy.base import make_policy
from ragjax.cache.pool import PagePool
from ragjax.cache.profile import Profile
from ragjax.core import Compression, ConfigError, CraftVariants, EngineOptions, Grid, RequestError
from ragjax.core.registry import meant, name_of
from ragjax.engine.knowledge import Knowledge
from ragjax.engine.measurement import report_of, report_path
from ragjax.engine.provision import least, planned
from ragjax.models.config import ModelConfig
from ragjax.models.decoder import WHOLE_NUMBERS, Decoder
from ragjax.models.executables import Executables
from ragjax.models.hub import LocalModel, cache_dir, resolve
from ragjax.models.packed import PackedForm
from ragjax.models.summary import memory_limits
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.trained import load_model, model_digest, reads_blocks, wrapper_of
from ragjax.models.weights import open_checkpoint
from ragjax.quality.contract import AUTO, Contract
from ragjax.quality.evidence import CANDIDATES, LiveEvidence
from ragjax.quality.report import Budget, Report, Setting
from ragjax.retrieval.index import IndexShape
from ragjax.reuse import compaction
from ragjax.reuse import strategies as all_strategies
from ragjax.reuse.base import Strategy
from ragjax.reuse.naive import PACKET
from ragjax.runner.device import cpu_features, is_wide, packs, platform, room_for, storage_dtype, widening_pays, widens
from ragjax.runner.mesh import copies_of, host_memory, make_mesh
from ragjax.runner.programs import Name
from ragjax.runner.runner import Runner
from ragjax.runner.supply import Supply
from ragjax.schedule.order import make_order
from ragjax.schedule.scheduler import StepBudget
from ragjax.store.disk import DiskStore
from ragjax.store.shared import SharedTier, open_shared
from ragjax.store.transfer import KVTransfer

_log = logging.getLogger(__name__)

PAGE_SIZE = 64
FLAT = Profile((0, 1), (1, 2), ((1.0, 2.0), (1.0, 2.0)))  # for policies that do not look at it
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Parts:
    model_name: str
    context_length: int  # most tokens of a prompt and its answer
    tokenizer: Tokenizer
    contract: Contract
    strategies: Mapping[str, Strategy]
    knowledge: Knowledge
    runner: Runner
    cache: KnowledgeCache
    transfer: KVTransfer | None = None
    disk: DiskStore | None = None
    shared: SharedTier | None = None
    budget: StepBudget | None = None
    supply: Supply | None = None
    tuning: Iterator[StepBudget | None] | None = None  # measures the budget once all programs are made
    compression: Compression | None = None
    identity: bytes = b""  # digest of what KV depends on besides tokens


def build(options: EngineOptions, strategies: Mapping[str, Strategy] | None = None, *, early: bool = False) -> Parts:
    """Load the model, compile its programs, and make everything else that an engine is made of.

    strategies: what requests may name (None: all of ragjax's). early: compile no more than answers any prompt, and the
    rest while requests run.
    """
    if is_wide():
        raise ConfigError(
            "ragjax does not run with jax_enable_x64: unset JAX_ENABLE_X64, or run ragjax in its own process"
        )
    _check_strategies(options, all_strategies() if strategies is None else strategies)
    storage = options.storage
    dtype = storage_dtype(options.dtype)
    local = resolve(options.model)
    craft = CraftVariants.parse(options.craft_variants)
    chosen = dict(strategies_of(local, craft) if strategies is None else strategies)
    _setting(options, chosen)  # a wrong name should not cost loading the weights
    Budget.parse(options.quality_budget)
    policy = make_policy(storage.policy, FLAT)  # likewise
    make_order(options.order)
    IndexShape.parse(options.index)
    tokenizer = Tokenizer.load(local.path)
    mesh = make_mesh(options.tensor_parallel, open_checkpoint(local.path).config)
    with _room_for_weights(), host_memory() if options.tensor_parallel > 1 else nullcontext():
        decoder = load_model(local, dtype, cache_dir(), _packed_form(options, mesh.size, dtype))
    config = decoder.config
    tokenizer.check(config)
    context = config.context_length if options.max_context is None else options.max_context
    if not 0 < context <= config.context_length:
        raise ConfigError(f"max_context must lie in [1, {config.context_length}], the model's context length")
    numbers_kept = dtype if options.weights == "stored" else f"{dtype} of {options.weights}"
    # all that KV depends on besides tokens; the configuration includes RoPE
    parts = (model_digest(local, cache_dir()), tokenizer.digest, config.to_json().encode(), numbers_kept.encode())
    identity = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
    kept_as = identity if decoder.kernels is None else hashlib.sha256(identity + decoder.kernels.encode()).digest()
    contract = contract_of(options, chosen, local.name, identity, dtype)
    compression = compression_of(options, [chosen[name] for name in contract.strategies])
    disk, disk_bytes = None, 0
    if storage.disk is not None:  # before the rest: a wrong folder should not cost a minute of compiling
        about = {"model": local.name, "dtype": dtype, "layers": str(config.num_layers)}
        about["kv_heads"], disk_bytes = str(config.num_kv_heads), int(storage.disk_gb * 2**30)
        disk = DiskStore.open(storage.disk, kept_as, about=about, max_bytes=disk_bytes)
    knowledge = Knowledge.open(options, tokenizer)
    if early and options.knowledge is not None:  # beside what follows
        knowledge.warm()
    shared = None if storage.remote is None else open_shared(storage.remote, kept_as, storage.at_rest, disk)
    copies = copies_of(mesh.size, config)
    page = page_bytes(config, DTYPE_BYTES[dtype], copies)
    pages = pool_pages(page, options.device_cache_gb, context)
    grid = _grid(config, context, platform(), copies, packed=decoder.kernels is not None)
    # packed matrices are read as they are
    widen = decoder.kernels is None and widens(options.dtype, platform(), cpu_features(), widening_pays)
    _log.info("weights and KV are %s%s", dtype, ", products of many rows in float32" if widen else "")
    with _room_for_weights():
        runner = Runner(
            decoder,
            pages=pages,
            page_size=PAGE_SIZE,
            context=context,
            grid=grid,
            mesh=mesh,
            widen=widen,
            executables=Executables(cache_dir() / "executables"),
            # XLA copies matrices out of a stack, but not packed ones; without a stack a program of one layer is small
            scanned=decoder.kernels is not None,
            stage_layers=1 if platform() == "cpu" and decoder.kernels is None else None,
        )
    if options.deterministic:
        _check_deterministic(decoder, runner)
    default = [chosen[name] for name in contract.strategies]
    supply = tuning = None
    # before it is measured: attention takes 4 operations for each key and dimension of a query head, at about half the
    # speed of the products with weights, which take 2 for each weight
    step_budget = StepBudget(keys=max(1, config.layer_weights // (4 * config.num_heads * config.head_dim)))
    with room_for(f"what a step computes, beside {runner.held}", "lower --device-cache-gb"):
        if options.compile:
            _compile(runner, least(runner, default, compression, whole=not early), options.progress)
            tuning = measured_budget(runner, step_budget.keys)
            if early:
                supply = runner.supply(planned(runner, default, chosen, compression))
            else:
                *_, measured = tuning
                step_budget, tuning = measured or step_budget, None
        if name_of(storage.policy) == "pgdsf":  # the others ask for no prefill times of this device
            policy = make_policy(storage.policy, measured_profile(runner, step_budget.keys))
    transfer = KVTransfer(runner, storage.at_rest, disk=shared or disk)
    quotas = {tenant: int(gigabytes * 2**30) for tenant, gigabytes in storage.quotas.items()}
    host_bytes = free_memory() // 4 if storage.host_gb is None else int(storage.host_gb * 2**30)
    if storage.host_gb is None:
        _log.info("up to %.1f GB of host memory keep KV (--host-cache-gb)", host_bytes / 2**30)
    tiers = Storage(transfer, page, host_bytes, shared or disk, quotas.get, shared, disk_bytes)
    return Parts(
        knowledge=knowledge,
        model_name=local.name,
        context_length=context,
        runner=runner,
        tokenizer=tokenizer,
        cache=KnowledgeCache(
            kept_as, PagePool(pages, PAGE_SIZE), policy, tiers, variants=storage.variants, keep=storage.keep
        ),
        contract=contract,
        strategies=chosen,
        transfer=transfer,
        disk=disk,
        shared=shared,
        budget=step_budget,
        supply=supply,
        tuning=tuning,
        compression=compression,
        identity=identity,
    )


def strategies_of(local: LocalModel, craft: CraftVariants) -> dict[str, Strategy]:
    return all_strategies(wrapper=wrapper_of(local), blocks=reads_blocks(local), craft=craft)


def contract_of(
    options: EngineOptions, chosen: Mapping[str, Strategy], name: str, identity: bytes, dtype: str
) -> Contract:
    budget, path = Budget.parse(options.quality_budget), report_path(identity)
    blank = Report(identity.hex(), name, dtype, "", "", 1, ())
    candidates = [one for one in CANDIDATES if one.strategy in chosen]
    report = report_of(identity, chosen)
    return Contract(
        _setting(options, chosen),
        dtype,
        budget=budget,
        report=report,
        evidence=None if report else LiveEvidence(blank, budget, candidates),
        path=path,
        shadow_rate=options.shadow_rate,
        preprocessed=frozenset(name for name, strategy in chosen.items() if strategy.preprocessed),
    )


def _room_for_weights() -> AbstractContextManager[None]:
    return room_for("the weights", "choose a smaller model, or share it out with --tensor-parallel")


def _packed_form(options: EngineOptions, devices: int, dtype: str) -> PackedForm | None:
    """The form of weights of few bits; None if all are widened."""
    bits = {"stored": None, "int8": 8, "int4": 4}[options.weights]
    if packs(devices, dtype):
        return PackedForm(tiled=not options.deterministic, bits=bits)
    if bits is not None:
        raise ConfigError(
            f"weights={options.weights} needs one CPU, dtype bfloat16 and llvmlite (docs/kernels.md); leave it out"
        )
    return None


def _check_deterministic(decoder: Decoder, runner: Runner) -> None:
    """Raise ConfigError if what a row computes may depend on the rows beside it."""
    if decoder.kernels != WHOLE_NUMBERS or runner.attention_kernel is None:
        raise ConfigError(
            "deterministic needs a checkpoint whose matrices all have 4 to 8 bits and stay so, on one CPU in bfloat16 "
            "(docs/kernels.md): choose another --model, or leave it out"
        )


def _check_strategies(options: EngineOptions, known: Mapping[str, Strategy]) -> None:
    if not isinstance(known, Mapping):
        raise ConfigError(f"strategies must be a mapping of names to strategies, not {known!r}")
    for name, strategy in known.items():
        if strategy.name != name:
            raise ConfigError(
                f"the strategy {strategy.name!r} is given as {name!r}: strategies go by their own names, so change one"
            )
    if options.shadow_rate > 0 and "full" not in known:
        raise ConfigError("a shadow rate needs the strategy full, to which requests turn after a fault")
    if options.strategy == AUTO and not {"full", "prefix"} <= known.keys():
        raise ConfigError("the strategy auto needs the strategies full and prefix: name another one")


def _setting(options: EngineOptions, known: Mapping[str, Strategy]) -> Setting:
    name, ratio = options.strategy, options.recompute_ratio
    if name == AUTO and ratio is None:
        return Setting(AUTO)
    if name == PACKET and name not in known:
        raise ConfigError("the model has no packets: give an adapter of python -m train.packet as --model")
    if name not in (AUTO, *known):
        raise ConfigError(f"unknown strategy {name!r}; {meant(name, (AUTO, *known))}")
    if ratio is not None and (name == AUTO or not known[name].selective):
        raise ConfigError(f"the strategy {name} takes no recompute ratio")
    return Setting(name, ratio)


def measured_profile(runner: Runner, keys: int) -> Profile:
    """Prefill times from steps of the two least programs, in less than a second.

    A prefill costs a step, its rows, and the keys that they read: `keys` of them are taken to cost as much as a row.
    """
    few, many = runner.grid.least[0], runner.grid.least[-1]
    few_s, many_s = runner.seconds(few.rows), runner.seconds(many.rows)
    row_s = max((many_s - few_s) / (many.rows - few.rows), few_s / (100 * few.rows))
    step_s = max(few_s - few.rows * row_s, row_s)
    key_s = row_s / keys
    cached, new = (0, 128, 512, 2048, 8192), (1, 32, 128, 512, 2048, 8192)
    rows = tuple(tuple(step_s + n * (row_s + key_s * (behind + n / 2)) for n in new) for behind in cached)
    _log.info("pgdsf goes by a step of %.1f ms and %.2f ms for a token", 1e3 * step_s, 1e3 * row_s)
    return Profile(cached, new, rows, "steps of this process")


def free_memory(system: Path = Path("/")) -> int:
    """Bytes of host memory that are free, in the process's control group too. system: where proc and sys lie."""
    try:
        told = (system / "proc/meminfo").read_text().split()
        free = int(told[told.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError):  # no Linux
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([free, *(limit - used for limit, used in memory_limits(system))]))


def page_bytes(config: ModelConfig, itemsize: int, copies: int = 1) -> int:
    """Bytes of a page of the device. copies: of each KV head, on as many devices."""
    return config.kv_bytes_per_token(itemsize) * PAGE_SIZE * copies


def pool_pages(page: int, gigabytes: float, context: int) -> int:
    """Pages of `page` bytes that fit, the scratch page included; ConfigError: not even one request of full context."""
    pages = int(gigabytes * 2**30) // page
    least = context // PAGE_SIZE + 2
    if pages < least:
        need = least * page / 2**30
        raise ConfigError(
            f"a device cache of {gigabytes:g} GB holds {max(pages, 0) * PAGE_SIZE} tokens; the context of {context} "
            f"needs {need:.2f} GB: raise --device-cache-gb or lower --max-context"
        )
    return pages


def _grid(config: ModelConfig, context: int, platform: str, copies: int, packed: bool) -> Grid:
    most = max(128, -(-2 * context // PAGE_SIZE))
    if platform == "cpu":
        return Grid(entries=(4 * most,), padding=0.1 if packed else 1.0)  # two cores: 0.05 ms, a row 0.65
    wide = 64 * (min(context, 8192) // PAGE_SIZE + 2)  # 64 requests of 8K tokens decode in one step
    rows = Grid.gpu_rows(config.num_groups // copies)
    return Grid(rows=rows, entries=(64, most), wide=wide, logits=(2, 8, 64))


def measured_budget(runner: Runner, keys: int) -> Iterator[StepBudget | None]:
    """The budget as measured on this device; None after each step that was measured before the last one."""
    decode = min(shape.rows for shape in runner.grid.rows if shape.block == 1)
    each = runner.grid.entries[0] // decode
    plain_s = runner.seconds(decode)
    yield None
    reading_s = runner.seconds(decode, each)
    key_s = (reading_s - plain_s) / (decode * each * runner.page_size)
    mixed_s = dict[int, float]()
    for shape in runner.grid.rows:
        if shape.mixed:
            yield None
            mixed_s[shape.rows] = runner.seconds(shape.rows)
    budget = StepBudget.fitted(plain_s, mixed_s, key_s, keys)
    _log.info("steps have up to %d tokens for each prompt that is computed while requests decode", budget.tokens)
    yield budget


def compression_of(options: EngineOptions, served: Iterable[Strategy]) -> Compression | None:
    if options.compression is None:
        return None
    compression = Compression.parse(options.compression)
    try:
        for strategy in served:
            compaction.check(compression, strategy)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return compression


def _compile(runner: Runner, names: Sequence[Name], progress: bool) -> None:
    runner.compile(tqdm(names, desc="compiling", unit="program", disable=not progress))
    runner.warm_up(names)
    if not runner.computes_numbers():
        raise ConfigError(
            "the model computes no numbers (NaN or infinity): its weights, or its adapter's, are damaged; fetch them "
            "again or name another --model"
        )
