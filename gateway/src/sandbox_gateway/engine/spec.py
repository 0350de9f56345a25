"""The parameters of the engine's operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sandbox_gateway.records import NetworkPolicy, OnTimeout


class Unset:
    """The type of UNSET, which means that no value was given. None is itself a valid value."""


UNSET: Final = Unset()


@dataclass(frozen=True)
class MountSpec:
    """A volume to mount in a sandbox."""

    volume: str
    """The name or id of the volume."""
    path: str
    read_only: bool = False
    clone: bool = False
    """Mount a clone of the volume as captured in the snapshot, instead of the volume itself."""


@dataclass
class ForkSpec:
    """The number and properties of sandboxes to create.

    ``cpus``, ``memory_mb`` and ``disk_mb``: None means the value of the snapshot.
    """

    count: int = 1
    names: list[str] | None = None
    """One name for each sandbox. None: each is named after its id."""
    concurrency: int | None = None
    """Maximum number of sandboxes that start at the same time. None: the host's default."""
    atomic: bool = True
    """Create either all sandboxes or none. False: create as many as possible."""
    cpus: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    cold_start: bool = False
    """Boot from the snapshot's disk instead of resuming from its memory."""
    paused: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    """Its ``allow_public_traffic`` is replaced by ``public_ports``."""
    public_ports: bool | None = None
    """Whether every client of the gateway can connect to the ports. None: the host's default."""
    mounts: list[MountSpec] | None = None
    """The mounts, in mount order. None: the mounts of the snapshot's source."""
    timeout: float | Unset | None = UNSET
    """Timeout in seconds. None: no timeout. UNSET: the host's default."""
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    idempotency_key: str = ""
    operation: str = ""
    """Id of the operation in progress events. Empty: publish no progress events."""
