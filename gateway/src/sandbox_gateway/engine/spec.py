"""What callers ask the engine for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sandbox_gateway.records import NetworkPolicy, OnTimeout


class Unset:
    """The type of UNSET: nothing was said, which is not the same as None."""


UNSET: Final = Unset()


@dataclass(frozen=True)
class MountSpec:
    """A volume to mount in a sandbox."""

    volume: str
    """Its name or id."""
    path: str
    read_only: bool = False
    clone: bool = False
    """Its own clone of what the snapshot holds of that volume, not the volume itself."""


@dataclass
class ForkSpec:
    """How many sandboxes to make, and what they shall be like. ``None`` and UNSET: as the snapshot has it."""

    count: int = 1
    names: list[str] | None = None
    """One for each; without, each is named by its id."""
    concurrency: int | None = None
    atomic: bool = True
    """All or none; otherwise as many as could be made."""
    cpus: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    cold_start: bool = False
    """Boot from the snapshot's disk rather than go on from its memory."""
    paused: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    mounts: list[MountSpec] | None = None
    """In the order in which they are mounted; None: what the snapshot's source had."""
    timeout: float | Unset | None = UNSET
    """Seconds to live; None: for ever; UNSET: the host's default."""
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_resume: bool = False
    idempotency_key: str = ""
    operation: str = ""
    """Id under which progress is published."""


@dataclass(frozen=True)
class ExecResult:
    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool


@dataclass(frozen=True)
class EvalResult:
    """What became of code in the sandbox's interpreter."""

    result: str
    """The ``repr`` of what its last expression comes to."""
    error: str
    """A sentence; empty where there was none."""
    exit_code: int
    """0, or 1 after an error."""
