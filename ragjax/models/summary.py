"""Sizes of models on this machine and of downloads, from configurations and the headers of weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from math import prod
from pathlib import Path

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig
from ragjax.models.hub import ADAPTED, PACKAGED, SNAPSHOT, LocalModel, NotHereError, is_repository, resolve
from ragjax.models.huggingface import read_config, read_json, weight_files
from ragjax.models.tensors import expected_shapes
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint


@dataclass(frozen=True)
class Summary:
    """A model that can be served.

    storage: how most of its weights are stored. stored_bytes: of its files of weights. has_template: a chat template.
    """

    config: ModelConfig
    storage: str
    stored_bytes: int
    has_template: bool

    @staticmethod
    def of(model: LocalModel) -> Summary:
        base = _summary(model.path)
        return replace(base, stored_bytes=base.stored_bytes + model.adapter.stat().st_size) if model.adapter else base


@cache  # adapters have one base
def _summary(path: Path) -> Summary:
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer.load(path)
    tokenizer.check(checkpoint.config)
    count: Counter[str] = Counter()
    for tensor in checkpoint.tensors.stored.values():
        count[tensor.dtype] += prod(tensor.shape)
    kind = count.most_common(1)[0][0]
    files = weight_files(path) if path.is_dir() else [path]
    stored = sum(file.stat().st_size for file in files)
    return Summary(checkpoint.config, kind if path.is_dir() else f"GGUF, {kind}", stored, tokenizer.has_template)


def parameters(config: ModelConfig) -> int:
    return sum(prod(shape) for shape in expected_shapes(config).values())


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    shapes = expected_shapes(config).values()
    return sum(prod(shape) * (itemsize if len(shape) > 1 else 4) for shape in shapes)


def memory_limits(system: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """Limits of memory of the control groups that this process is in, and what each uses, bytes.

    Pages of files are not counted: they leave where room is needed. system: where proc and sys lie.
    """
    try:
        own = [line.split(":", 2) for line in (system / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # no Linux
        return
    root = system / "sys/fs/cgroup"
    for _, kinds, path in own:
        if kinds == "":  # version 2
            top, limit, used = root, "memory.max", "anon"
        elif "memory" in kinds.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a container does not see all groups; one without a limit says "max"
                counts = (folder / "memory.stat").read_text().split()
                yield int((folder / limit).read_text()), int(counts[counts.index(used) + 1])
            if folder == top:
                break


@dataclass(frozen=True)
class DeviceMemory:
    platform: str
    bytes: int


def device_memory() -> DeviceMemory:
    """Memory of the first device: its allocator's limit; on a CPU the machine's memory, or the container's limit."""
    import jax  # late: `ragjax models list` asks no device

    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
    if not limit:
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = min([limit, *(most for most, _ in memory_limits())])
    return DeviceMemory(device.platform, int(limit))


@dataclass(frozen=True)
class Offer:
    """A model to download: size in bytes and configuration, each None if it is not known before."""

    bytes: int | None
    config: ModelConfig | None


def inventory() -> Iterator[tuple[str, LocalModel | None]]:
    """The packaged models, and repositories in the cache of Hugging Face, by name; None for what is not here."""
    for name in (*PACKAGED, *ADAPTED, *_repositories()):
        try:
            yield name, resolve(name, download=False)
        except NotHereError:
            yield name, None


def offer(name: str) -> Offer:
    """Describe a download of this model; only a repository's config.json is fetched for it."""
    if name in PACKAGED:
        return Offer(PACKAGED[name].bytes, None)
    if not is_repository(name):
        return Offer(None, None)
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
        config = read_config(read_json(Path(hf_hub_download(name, "config.json"))))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{name}: cannot be fetched from Hugging Face: {error}") from error
    wanted = [file for file in files if any(fnmatch(file.rfilename, pattern) for pattern in SNAPSHOT)]
    return Offer(sum(file.size or 0 for file in wanted), config)


def _repositories() -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    # the cache may hold ids without an owner (gpt2), which are no name of a model here
    return sorted(repo.repo_id for repo in found if repo.repo_type == "model" and is_repository(repo.repo_id))
