"""The interface of each way to snapshot, fork and roll back a running machine."""

from __future__ import annotations

from typing import Protocol

OPERATIONS = ("snapshot", "fork_1", "fork_10", "rollback")
MANY = 10


class Rival(Protocol):
    """A running source machine, and its latest snapshot.

    The first three methods are timed. Each returns when its commands have ended and the machines that they left running
    have answered the probe.
    """

    key: str
    title: str
    not_offered: dict[str, str]
    """Operations that it lacks, each with the reason."""
    address: str
    """Address of the source, for pings."""
    prefix: tuple[str, ...]
    """Words that make a command run in a network from which the source can be reached."""

    def snapshot(self) -> None:
        """Take a snapshot of the source, which continues to run."""

    def fork(self, count: int) -> None:
        """Start ``count`` machines from the latest snapshot; the source keeps running where possible."""

    def rollback(self) -> None:
        """Return the source to the latest snapshot."""

    def written(self) -> float:
        """Return the bytes that the latest snapshot takes on the disk."""

    def remove_forks(self) -> None:
        """Remove all forks."""

    def remove_snapshot(self) -> None:
        """Remove the latest snapshot."""
