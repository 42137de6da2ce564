"""The tokenizer of a Hugging Face directory: tokenizer.json, tokenizer_config.json and chat_template.jinja."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError
from ragjax.models.huggingface import read_json
from ragjax.models.tokenizer_definition import TOKEN_FLAGS, TokenizerSettings, build


def settings_of_directory(path: Path) -> TokenizerSettings:
    """The tokenizer settings in a Hugging Face directory. Raises ConfigError."""
    definition = read_json(path / "tokenizer.json")
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    known = {token["content"] for token in definition.get("added_tokens") or []}
    extra = [
        {"id": int(token), **TOKEN_FLAGS, **flags}
        for token, flags in (settings.get("added_tokens_decoder") or {}).items()
        if flags["content"] not in known
    ]
    extra.sort(key=lambda token: token["id"])  # as they are numbered on from the vocabulary
    definition["added_tokens"] = [*(definition.get("added_tokens") or []), *extra]
    engine = build(definition)
    special: dict[str, int] = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str):
            raise ConfigError(f"{path / 'tokenizer_config.json'}: {role} must be the token's text, not {text!r}")
        token = engine.token_to_id(text)
        if token is None:
            raise ConfigError(f"{path / 'tokenizer_config.json'}: {role} {text!r} is not in the vocabulary")
        special[role] = token
    return TokenizerSettings(
        definition=definition,
        special=special,
        eos_ids=(special["eos_token"],) if "eos_token" in special else (),
        add_bos=settings.get("add_bos_token"),
        chat_template=_directory_template(path, settings),
    )


def _directory_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json (one, or several by name)."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    try:
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path / 'tokenizer_config.json'}: each chat_template must have name and template"
        ) from error
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path / 'tokenizer_config.json'}: chat_template must be a text, not {template!r}")
    return template
