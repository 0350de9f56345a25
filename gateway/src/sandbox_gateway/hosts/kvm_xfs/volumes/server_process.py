"""One volume server: its process, its configuration file, and the stored description of its volume and clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.qemu.bounded_log import read_log
from sandbox_gateway.hosts.kvm_xfs.volumes import launcher
from sandbox_gateway.hosts.kvm_xfs.volumes.launcher import CONFIG, ROOT

_STEADY_SECONDS = 60.0
_MAX_BACKOFF_SECONDS = 30.0
_SETTINGS = "wanted.json"


@dataclass(frozen=True)
class ServerSettings:
    """The volume that a server should serve, and its clients; stored beside the server for the next gateway."""

    image: str
    port: int
    clients: dict[str, bool]

    def access(self) -> set[str]:
        """Return the elements of the host's set that allow the clients to connect."""
        return {f"{address} . {port}" for address in self.clients for port in (self.port, self.port + 1)}


@dataclass
class ServerProcess:
    volume: str
    pid: int
    settings: ServerSettings
    is_current: bool = False
    """Whether the server is known to have applied its configuration. False for an adopted server."""
    pidfd: int = -1
    log: int = -1
    """Descriptor of the memory that contains its log."""
    started: float = field(default_factory=time.monotonic)
    early_ends: int = 0
    """Number of directly preceding servers of this volume that ended soon after their start."""

    def backoff_seconds(self) -> float:
        """Return the seconds to wait before starting a successor: a guest may crash each server on purpose."""
        if time.monotonic() - self.started >= _STEADY_SECONDS or not self.early_ends:
            return 0.0
        return min(2.0 ** (self.early_ends - 1), _MAX_BACKOFF_SECONDS)

    def has_ended(self) -> bool:
        return self.pidfd < 0 or wait_until_ended(self.pidfd, 0)

    def signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def directory(self) -> int:
        """Open the root of the served file system. Raises BackendFailed if the server has ended."""
        return self._descriptor(f"root/{self.volume}")

    def configure(self, text: str) -> None:
        """Replace the server's configuration, which it reads on SIGHUP.

        Raises BackendFailed if the server has ended.
        """
        root = self._descriptor(f"fd/{ROOT}")
        try:
            replace_file(Path(f"/proc/self/fd/{root}", CONFIG), text)
        finally:
            os.close(root)

    def is_isolated(self, space: Path) -> bool:
        """Return whether the server has no access to the host's files and runs in the network namespace ``space``."""
        with contextlib.suppress(OSError):
            mounts = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
            alone = {line.split()[4] for line in mounts} == {"/", f"/{self.volume}"}
            return alone and Path(f"/proc/{self.pid}/ns/net").samefile(space)
        return False

    def log_tail(self) -> str:
        """Return the tail of the server's log, as the end of a sentence."""
        try:
            lines = read_log(self.log).splitlines()
        except OSError:
            return ""
        # Each line starts with date, program and thread; lines of level NULL are always written.
        said = [line.rpartition("] ")[2].strip() for line in lines if ":NULL :" not in line]
        return f": {'; '.join(said[-4:])[-800:]}" if said else ""

    def _descriptor(self, what: str) -> int:
        """Open a directory below the server's entry in /proc."""
        try:
            found = os.open(f"/proc/{self.pid}/{what}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BackendFailed(f"the server of volume {self.volume} has ended ({error.strerror}): try again") from None
        if self.has_ended():  # The pid may belong to another process by now.
            os.close(found)
            raise BackendFailed(f"the server of volume {self.volume} has ended: try again: try again")
        return found

    def stop_watching(self) -> None:
        """Stop watching the process, which keeps running."""
        if self.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            os.close(self.pidfd)
        if self.log >= 0:
            os.close(self.log)
        self.pidfd = self.log = -1


def wait_until_ended(pidfd: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for a process to end. Returns whether it has ended."""
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def list_processes(root: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the processes of servers below ``root``: (pid, volume, whether it serves or is still being launched)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for word in (entry / "cmdline").read_bytes().decode(errors="replace").split("\0"):
                path = Path(word)
                if path.name == launcher.SERVER and path.parent.parent == root:
                    yield int(entry.name), path.parent.name, True
                elif path.parent == root:
                    yield int(entry.name), path.name, False


def save_settings(directory: Path, settings: ServerSettings) -> None:
    """Store a server's volume and clients beside it."""
    replace_file(directory / _SETTINGS, json.dumps(asdict(settings)))


def load_settings(directory: Path) -> ServerSettings | None:
    """Load a server's volume and clients; None if they cannot be read."""
    try:
        found = json.loads((directory / _SETTINGS).read_text())
        return ServerSettings(
            str(found["image"]), int(found["port"]), {str(k): bool(v) for k, v in found["clients"].items()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: readers see either the old text or the new text."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)
