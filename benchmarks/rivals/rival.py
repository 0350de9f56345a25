"""Define the interface of each way to snapshot, fork and roll back a running machine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

FORK_COUNT = 10


class Rival(Protocol):
    """A way to snapshot, fork and roll back a running source. Only the latest snapshot is kept.

    ``snapshot``, ``fork`` and ``rollback`` are timed. Each returns once its commands have exited and all machines that
    should run afterwards have answered the probe.
    """

    key: str
    title: str
    baseline_key: str
    """The key of the rival that this one is compared with, or empty for our own."""
    not_offered: dict[str, str]
    """The operations that the rival does not support, each with the reason."""

    def snapshot(self) -> None:
        """Take a snapshot of the source, which then continues to run."""

    def rollback(self) -> None:
        """Roll the source back to the latest snapshot."""

    def remove_snapshot(self) -> None:
        """Remove the latest snapshot. The source continues to run."""


@runtime_checkable
class ForkingRival(Rival, Protocol):
    def fork(self, count: int) -> None:
        """Start ``count`` machines from the latest snapshot. The source continues to run."""

    def remove_forks(self) -> None:
        """Remove all forks."""


@runtime_checkable
class VirtualMachine(Rival, Protocol):
    address: str
    """The address of the source, for pings."""
    prefix: tuple[str, ...]
    """The prefix of commands that must run in the network of ``address``."""

    def count_written_bytes(self) -> float:
        """Return how many bytes were written to the disk for the latest snapshot."""
