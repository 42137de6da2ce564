"""One engine that serves requests whose prompts were made elsewhere, and the messages between it and its fleet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ragjax import core
from ragjax.engine import Engine
from ragjax.engine.stats import Stats
from ragjax.quality.report import Setting
from ragjax.store.folder import link

_log = logging.getLogger(__name__)

Choose = Callable[[Collection[str]], Sequence[str]]
"""Names of replicas that run, to the same in the order in which they are to be tried."""


@dataclass(frozen=True)
class Card:
    model_name: str
    context_length: int  # most tokens of a prompt and its answer
    identity: bytes  # digest of what KV depends on besides tokens
    dtype: str  # of weights and KV
    strategies: tuple[str, ...]
    limits: core.StepLimits  # what one step can read


@dataclass
class Call:
    """A request on its way to a replica; its prompt is made. choose: which replica; it stays with the fleet."""

    request: core.Request
    choose: Choose | None

    def __reduce__(self) -> tuple[Any, ...]:
        return Call, (self.request, None)


@dataclass(frozen=True)
class Begun:
    replica: str


Item = Begun | core.Event | core.RagjaxError
"""What comes back: the replica, events, and after them an error if there was one."""


@dataclass(frozen=True)
class Status:
    """Periodic report of a replica.

    name: of this process; one that takes its place has another. rank: from 0 on, which its successor has too.
    pick: the setting that `auto` picks. fault: what its answers say of one that was labelled exact and is not; None: it
    found none. shadows: strategies and divergences of replays since the last.
    """

    name: str
    rank: int
    stats: Stats
    pick: Setting
    fault: str | None = None
    shadows: tuple[tuple[str, core.Divergence], ...] = ()


class Transport(Protocol):
    """Reaches the replicas that run. All but `serve` may wait, and are called by threads."""

    def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        """Serve a request at one replica, or raise LostError; closing the iterator cancels it there."""
        ...

    def card(self) -> Card: ...

    def statuses(self) -> Sequence[Status]: ...

    def inventories(self, tenant: str) -> Mapping[int, core.Inventory]: ...

    def wanted(self) -> int: ...

    def close(self) -> None: ...


SHADOWS = 256
"""Replays that are kept until the fleet asks; older ones are dropped."""


class Replica:
    def __init__(self, engine: Engine, name: str, rank: int):
        self.name = name
        self.rank = rank
        self._engine = engine
        self._contract = engine.contract
        self._shadows: deque[tuple[str, core.Divergence]] = deque(maxlen=SHADOWS)
        engine.observe_shadows(lambda strategy, seen: self._shadows.append((strategy, seen)))

    async def serve(self, call: Call) -> AsyncGenerator[Item, None]:
        """The replica, then the engine's events; an error that a client is to know of comes as the last item."""
        yield Begun(self.name)
        try:
            async with aclosing(self._engine.submit(call.request)) as events:
                async for event in events:
                    yield event
        except core.RagjaxError as error:
            yield error

    def card(self) -> Card:
        of = self._engine
        return Card(of.model_name, of.context_length, of.identity, of.dtype, of.strategies, of.limits)

    def status(self) -> Status:
        shadows = tuple(self._shadows.popleft() for _ in range(len(self._shadows)))
        fault = next(iter(self._contract.notices), None) if self._contract.faulted else None
        return Status(self.name, self.rank, self._engine.stats(), self._contract.pick, fault, shadows)

    def inventory(self, tenant: str) -> tuple[int, core.Inventory]:
        return self.rank, self._engine.inventory(tenant)

    def check(self) -> None:
        if self._engine.closed:
            raise core.ClosedError("the engine of this replica has ended")

    def close(self) -> None:
        self._engine.close()


def needs(devices: int, resources: Mapping[str, float], flags: str) -> dict[str, Any]:
    """Resources that a replica over so many devices asks Ray for, as options of its actor.

    resources: of the cluster. flags: XLA's, of this process. One CPU, and where the cluster has GPUs so many of those,
    on one machine, which are then all that JAX sees. Where it has none, JAX in the replica's process makes so many
    virtual devices of the CPU.
    """
    if resources.get("GPU"):
        return {"num_cpus": 1, "num_gpus": devices}
    if devices == 1:
        return {"num_cpus": 1}
    virtual = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    return {"num_cpus": 1, "runtime_env": {"env_vars": {"XLA_FLAGS": virtual}}}


def check_room(count: int, devices: int, resources: Mapping[str, float]) -> None:
    """Raise ConfigError if replicas over so many devices each do not fit a machine: Ray would wait for another one."""
    one = needs(devices, resources, "")
    for resource, name in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        there, wanted = int(resources.get(resource, 0)), count * one.get(name, 0)
        if wanted > there:
            each = f" over {devices} devices each" if devices > 1 else ""
            raise core.ConfigError(
                f"--replicas: {count}{each} take {wanted} {resource}s, and this machine has {there}: have fewer, or "
                "give RAY_ADDRESS of a cluster"
            )


def load(options: core.EngineOptions, rank: int) -> Engine:
    own = options_of(options, rank)
    shared, disk = options.storage.disk, own.storage.disk
    if shared is not None and disk is not None:
        try:
            link(Path(shared), Path(disk))
        except OSError as error:
            _log.warning("%s: not all that %s holds can be used: %s", disk, shared, error)
    return Engine.load(own, early=True)


def options_of(options: core.EngineOptions, rank: int) -> core.EngineOptions:
    disk = options.storage.disk
    own = None if disk is None else Path(disk) / f"replica-{rank}"
    return replace(
        options,
        knowledge=None,
        graph=None,
        index_dir=None,
        encoder=core.ENCODER,
        chunk_tokens=core.CHUNK_TOKENS,
        storage=replace(options.storage, disk=own),
        progress=False,
    )
