"""Checkpoints of a run: written by Orbax in the background, whole or not at all, the last few kept.

A checkpoint holds what training changes: the trained weights, the optimizer's state and the step. What else decides how
a run goes on (data order, random numbers) is a function of the step and of the settings, which are checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from ragjax.core import ConfigError
from ragjax.core.file import atomic_path

State = TypeVar("State")

_SETTINGS = "settings.json"


class Checkpoints:
    """The checkpoints in a folder; use it as a context, whose end waits for what is being written."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, resume: bool, keep: int = 2):
        """Open or make the folder. settings: what must be the same for a run to go on, JSON values."""
        self._folder = Path(folder).absolute()
        note = self._folder / _SETTINGS
        if note.exists() and not resume:
            raise ConfigError(f"{folder} has a run's checkpoints: go on with --resume, or give another --out")
        if resume:
            _check(note, settings)
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(note) as part:
            part.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder / "steps", options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """The last step that was saved whole."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: Any) -> None:
        """Save arrays as they are after so many steps; they may change as soon as this returns."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: State) -> State:
        """Load the state saved after so many steps, in the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state: State = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return state


def _check(note: Path, settings: Mapping[str, Any]) -> None:
    try:
        saved = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{note.parent}: no run to go on with; leave out --resume") from error
    for name in sorted({*saved, *settings}):
        if saved.get(name) != json.loads(json.dumps(settings.get(name))):
            raise ConfigError(
                f"{note.parent}: the run was started with {name} {saved.get(name)!r}, not {settings.get(name)!r}"
            )
