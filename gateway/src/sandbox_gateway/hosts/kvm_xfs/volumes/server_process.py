"""Control the process of a volume server, and store its settings so that a restarted gateway can adopt it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs import process_checks
from sandbox_gateway.hosts.kvm_xfs.bounded_log import read_log
from sandbox_gateway.hosts.kvm_xfs.process_checks import send_signal, wait_for_exit
from sandbox_gateway.hosts.kvm_xfs.volumes import launcher
from sandbox_gateway.hosts.kvm_xfs.volumes.launcher import CONFIG_FILE, ROOT_FD

_STABLE_AFTER_SECONDS = 60.0
_MAX_BACKOFF_SECONDS = 30.0
_SETTINGS_FILE = "wanted.json"
_DIRECTORY_ARGUMENT = 5
"""The position of a server's directory in the command line of its launcher (`python -I -S launcher.py IMAGE …`)."""


@dataclass(frozen=True)
class ServerSettings:
    """The volume that a server must serve, and whether each client, keyed by address, is read-only."""

    image: str
    port: int
    clients: dict[str, bool]

    def list_access_pairs(self) -> set[str]:
        """Return the (address . port) pairs that the host must allow so that the clients can connect."""
        return {f"{address} . {port}" for address in self.clients for port in (self.port, self.port + 1)}


@dataclass
class ServerProcess:
    """The process of a volume server, which may have exited."""

    volume: str
    pid: int
    settings: ServerSettings
    is_current: bool = False
    """Whether the server has confirmed that it applied its configuration. False for an adopted server."""
    pidfd: int = -1
    log: int = -1
    """Descriptor of the server's in-memory log."""
    start_time: float = field(default_factory=time.monotonic)
    early_exits: int = 0
    """The number of consecutive servers of this volume, before this one, that exited soon after they were started."""

    def compute_backoff_seconds(self) -> float:
        """Return the seconds to wait before starting a replacement.

        The delay grows with each consecutive early exit, because a guest may crash each replacement in turn.
        """
        if not self.was_started_recently() or not self.early_exits:
            return 0.0
        return min(2.0 ** (self.early_exits - 1), _MAX_BACKOFF_SECONDS)

    def was_started_recently(self) -> bool:
        """Return whether the server was started so recently that exiting now counts as early."""
        return time.monotonic() - self.start_time < _STABLE_AFTER_SECONDS

    def has_ended(self) -> bool:
        return self.pidfd < 0 or wait_for_exit(self.pidfd, 0)

    def send_signal(self, number: signal.Signals) -> None:
        if self.pidfd >= 0:
            send_signal(self.pidfd, number)

    def open_root(self) -> int:
        """Return a descriptor of the root of the served file system. Raises BackendFailed if the server has exited."""
        return self._open(f"root/{self.volume}", os.O_RDONLY | os.O_NOFOLLOW)

    def configure(self, text: str) -> None:
        """Replace the server's configuration, which it reads on SIGHUP.

        Raises BackendFailed if the server has exited or prevents this.
        """
        root_fd = self._open(f"fd/{ROOT_FD}", os.O_PATH)
        try:
            # A compromised server can make its descriptor refer to any directory that it can open, but it cannot change
            # its root.
            if not os.path.samestat(os.fstat(root_fd), os.stat(f"/proc/{self.pid}/root")):  # noqa: PTH116
                raise BackendFailed(f"the server for volume {self.volume} has closed its root directory")
            replace_file(CONFIG_FILE, text, dir_fd=root_fd)
        except OSError as error:
            raise BackendFailed(
                f"the configuration of the server for volume {self.volume} cannot be written ({error.strerror})"
            ) from None
        finally:
            os.close(root_fd)

    def is_isolated(self, namespace: Path) -> bool:
        """Return whether the server sees only its volume's files and runs in the network namespace ``namespace``."""
        with contextlib.suppress(OSError):
            mount_lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
            sees_only_volume = {line.split()[4] for line in mount_lines} == {"/", f"/{self.volume}"}
            return sees_only_volume and Path(f"/proc/{self.pid}/ns/net").samefile(namespace)
        return False

    def log_tail(self) -> str:
        """Return ": " and the tail of the server's log, to append to a sentence, or "" if the log is empty."""
        try:
            lines = read_log(self.log).splitlines()
        except OSError:
            return ""
        # Each line starts with date, program and thread; lines of level NULL are always written.
        messages = [line.rpartition("] ")[2].strip() for line in lines if ":NULL :" not in line]
        return f": {'; '.join(messages[-4:])[-800:]}" if messages else ""

    def _open(self, path: str, flags: int) -> int:
        """Open a directory in the server's entry in /proc and return the descriptor."""
        try:
            descriptor = os.open(f"/proc/{self.pid}/{path}", flags | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BackendFailed(
                f"the server for volume {self.volume} has exited ({error.strerror}): try again"
            ) from None
        if self.has_ended():  # Another process may have the same pid now.
            os.close(descriptor)
            raise BackendFailed(f"the server for volume {self.volume} has exited: try again")
        return descriptor

    def stop_watching(self) -> None:
        """Stop watching the process, which keeps running."""
        if self.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            os.close(self.pidfd)
        if self.log >= 0:
            os.close(self.log)
        self.pidfd = self.log = -1


class FoundServer(NamedTuple):
    """A server process or a launcher. The owner of this object closes ``pidfd``."""

    pid: int
    pidfd: int
    volume: str
    """The volume that the process claims to serve, or "" if the process hides its volume."""
    is_serving: bool
    """False for a launcher, and for a process that hides its volume."""


def find_servers(root: Path, namespace: Path) -> Iterator[FoundServer]:
    """Yield each process of a volume server: those with files in ``root``, and all those that run in ``namespace``.

    ``namespace``: the file of the network namespace of volume servers. Only root can start a process there.
    """
    servers_namespace = None
    with contextlib.suppress(FileNotFoundError):
        servers_namespace = process_checks.identify_namespace(namespace)

    def identify(pid: int, pidfd: int) -> tuple[str, bool] | None:
        if claim := _find_claimed_volume(pid, root):
            return claim
        return ("", False) if process_checks.read_network_namespace(pid, pidfd) == servers_namespace else None

    for pid, pidfd, (volume, is_serving) in process_checks.find_processes(identify):
        yield FoundServer(pid, pidfd, volume, is_serving)


def _find_claimed_volume(pid: int, root: Path) -> tuple[str, bool] | None:
    """Return the volume and whether the process serves it, or None unless it claims to be a server of the gateway."""
    arguments = process_checks.read_arguments(pid)
    path, is_serving = Path(arguments[0]).parent, Path(arguments[0]).name == launcher.SERVER_NAME
    if not is_serving and len(arguments) > _DIRECTORY_ARGUMENT:
        path = Path(arguments[_DIRECTORY_ARGUMENT])
    if path.parent != root:
        return None
    # Check the program too, because users choose the arguments of programs that become root, such as sudo.
    with contextlib.suppress(OSError):
        if process_checks.is_run_by_gateway_user(pid) and process_checks.read_program_name(pid).startswith(
            launcher.SERVER_NAME if is_serving else "python"
        ):
            return path.name, is_serving
    return None


def save_settings(directory: Path, settings: ServerSettings) -> None:
    """Store a server's settings in its directory."""
    replace_file(directory / _SETTINGS_FILE, json.dumps(asdict(settings)))


def load_settings(directory: Path) -> ServerSettings | None:
    """Load a server's settings from its directory. Returns None if they cannot be read."""
    try:
        data = json.loads((directory / _SETTINGS_FILE).read_text())
        clients = {str(address): bool(read_only) for address, read_only in data["clients"].items()}
        return ServerSettings(str(data["image"]), int(data["port"]), clients)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def replace_file(path: str | Path, text: str, *, dir_fd: int | None = None) -> None:
    """Write a file atomically: readers see either the old text or the new text.

    ``dir_fd``: descriptor of the directory to which ``path`` is relative. Other processes may change this directory at
    the same time, so the function does not follow links. Raises OSError.
    """
    new_path = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new_path, dir_fd=dir_fd)
    # O_EXCL: never write to an existing file, not even through a link.
    descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.rename(new_path, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
