"""Start QEMU processes in network namespaces, and find running ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sandbox_gateway.command import child_environment
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs import process_checks
from sandbox_gateway.hosts.kvm_xfs.network.addresses import RUN_NETNS
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import in_namespace


class MachineProcess(NamedTuple):
    """A process whose command line is that of a machine, which does not prove that a gateway started it."""

    pid: int
    directory: Path
    """The directory of the machine's files when it started. They may have been moved since."""
    slot_number: int | None
    """The number of the network slot in which the process runs. None: in no slot, so that any user can have started it.

    The number comes from the kernel. A guest that controls QEMU cannot change it.
    """

    @property
    def instance(self) -> str:
        return self.directory.name


def list_running(root: Path, prefix: str) -> Iterator[MachineProcess]:
    """Yield each process whose command line names a memory file below ``root``. ``prefix``: ``network.prefix``."""
    slots: dict[tuple[int, int], int] = {}
    for path in RUN_NETNS.glob(f"{prefix}-*"):
        number = path.name.removeprefix(f"{prefix}-")
        if number.isdecimal():
            with contextlib.suppress(FileNotFoundError):
                slots[_identify(path)] = int(number)
    for pid in process_checks.list_pids():
        with contextlib.suppress(OSError):
            options = [each for each in process_checks.read_arguments(pid) if f"mem-path={root}/" in each]
            directory = Path(options[0].split("mem-path=", 1)[1].split(",", 1)[0]).parent if options else root
            if directory.parent.parent == root:
                yield MachineProcess(pid, directory, slots.get(_identify(Path(f"/proc/{pid}/ns/net"))))


def _identify(namespace: Path) -> tuple[int, int]:
    status = namespace.stat()
    return status.st_dev, status.st_ino


def start_in_namespace(namespace: Path, argv: list[str], pass_fds: list[int], output: int) -> int:
    """Start a process in a network namespace and return its pid. The calling thread returns to its own namespace."""
    with in_namespace(namespace):
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env=child_environment(),
                start_new_session=True,
                cwd="/",
            )
        except FileNotFoundError:
            raise BackendFailed(
                f"{argv[0]} is not installed: install qemu-system-x86, or run the kvm_xfs_host role"
            ) from None
    # The owner of the pidfd reaps the child. Setting this stops subprocess from warning that it still runs.
    process.returncode = 0
    return process.pid
