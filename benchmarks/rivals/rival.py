"""Define the interface of each way to snapshot, fork and roll back a running machine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

FORK_COUNT = 10


class Rival(Protocol):
    """A running source, and its latest snapshot.

    ``snapshot``, ``fork`` and ``rollback`` are timed. Each returns when its commands have ended and the machines that
    they left running have answered the probe.
    """

    key: str
    title: str
    compared_with: str
    """Key of the rival that this one is compared with; empty for our own."""
    not_offered: dict[str, str]
    """Operations that it does not offer, each with the reason."""

    def snapshot(self) -> None:
        """Take a snapshot of the source, which then continues to run."""

    def rollback(self) -> None:
        """Return the source to the latest snapshot."""

    def remove_snapshot(self) -> None:
        """Remove the latest snapshot. The source continues to run."""


@runtime_checkable
class CanFork(Rival, Protocol):
    def fork(self, count: int) -> None:
        """Start ``count`` machines from the latest snapshot. The source continues to run."""

    def remove_forks(self) -> None:
        """Remove all forks."""


@runtime_checkable
class VirtualMachine(Rival, Protocol):
    address: str
    """Address of the source, for pings."""
    prefix: tuple[str, ...]
    """Prefix for commands that must run in the network of ``address``."""

    def bytes_written(self) -> float:
        """Return the number of bytes that the latest snapshot uses on the disk."""
