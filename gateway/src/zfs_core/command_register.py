"""Keep track of commands while they run, and of commands that did not finish in time."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RunningCommand:
    """A command that is running, or that was killed and has not exited yet because it is hung in the kernel.

    It may also be a command that has not started yet because it waits for another command; ``command`` then says so.

    ``command``: the program and its subcommand. ``started_at``: in seconds since 1970. ``timeout_seconds``: the time
    after which it is killed. ``thread``: the identifier of the thread that waits for it.
    """

    command: str
    name: str
    started_at: float
    timeout_seconds: float
    was_killed: bool
    thread: int


@dataclass
class _Entry:
    process: subprocess.Popen[bytes]
    command: RunningCommand


_lock = threading.Lock()
_running_commands: list[RunningCommand] = []
"""The commands that a thread waits for."""
_killed_entries: list[_Entry] = []
"""The killed commands that have not exited yet. No thread waits for them."""
_timeout_count = 0


def list_running_commands() -> list[RunningCommand]:
    """Return the commands that are running, oldest first."""
    with _lock:
        _killed_entries[:] = [entry for entry in _killed_entries if entry.process.poll() is None]
        commands = [*_running_commands, *(entry.command for entry in _killed_entries)]
    return sorted(commands, key=lambda command: command.started_at)


def count_timeouts() -> int:
    """Return how many commands this process has killed because they did not finish in time."""
    return _timeout_count


@contextlib.contextmanager
def tracked(process: subprocess.Popen[bytes], name: str | None, timeout_seconds: float) -> Iterator[RunningCommand]:
    """Keep track of ``process`` inside this context, and until it exits.

    If the process does not finish in time, the context must exit with TimeoutExpired. ``name``: the dataset.
    """
    global _timeout_count
    words = [str(word) for word in process.args] if isinstance(process.args, list) else [str(process.args)]
    with _listed(" ".join(words[:2]), name or words[-1], timeout_seconds) as command:
        try:
            yield command
        except subprocess.TimeoutExpired:
            with _lock:
                _timeout_count += 1
            raise
        finally:
            with _lock:
                if process.returncode is None:
                    _killed_entries.append(_Entry(process, replace(command, was_killed=True)))


@contextlib.contextmanager
def waiting(command: str, name: str | None, timeout_seconds: float) -> Iterator[None]:
    """List ``command`` while it waits inside this context for another command, before it can start."""
    with _listed(f"{command} (waiting for another command)", name or "", timeout_seconds):
        yield


@contextlib.contextmanager
def _listed(words: str, name: str, timeout_seconds: float) -> Iterator[RunningCommand]:
    command = RunningCommand(words, name, time.time(), timeout_seconds, False, threading.get_ident())
    with _lock:
        _running_commands.append(command)
    try:
        yield command
    finally:
        with _lock:
            _running_commands.remove(command)
