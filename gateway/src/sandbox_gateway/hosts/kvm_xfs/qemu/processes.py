"""Start QEMU processes in network namespaces, and find running ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sandbox_gateway.command import build_child_environment
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs import process_checks
from sandbox_gateway.hosts.kvm_xfs.network.addresses import RUN_NETNS
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import in_namespace


class MachineProcess(NamedTuple):
    """A process that runs in a network slot, or that has the command line of a machine.

    The command line does not prove that a gateway started the process. The owner of this object closes ``pidfd``.
    """

    pid: int
    pidfd: int
    directory: Path | None
    """The directory of the machine's files when it started, according to the command line. They may have been moved."""
    slot_number: int | None
    """The number of the network slot in which the process runs. None: not in a slot, so any user may have started it.

    The number comes from the kernel. A guest that controls QEMU cannot change it.
    """

    @property
    def instance(self) -> str:
        """The instance that the process claims to be, or an empty string."""
        return self.directory.name if self.directory else ""


def list_running_processes(root: Path, prefix: str) -> Iterator[MachineProcess]:
    """Yield each process that runs in a network slot, or whose command line names a memory file in ``root``.

    ``prefix``: ``network.prefix``. Only root can start a process in a slot. So a process there that does not claim to
    be a machine either hides its identity, or was started by a gateway that died.
    """
    slots: dict[tuple[int, int], int] = {}
    for path in RUN_NETNS.glob(f"{prefix}-*"):
        number = path.name.removeprefix(f"{prefix}-")
        if number.isdecimal():
            with contextlib.suppress(FileNotFoundError):
                slots[process_checks.identify_namespace(path)] = int(number)

    def identify(pid: int, pidfd: int) -> tuple[Path | None, int | None] | None:
        directory = _find_claimed_directory(pid, root)
        slot_number = slots.get(process_checks.read_network_namespace(pid, pidfd))
        return None if directory is None and slot_number is None else (directory, slot_number)

    for pid, pidfd, (directory, slot_number) in process_checks.find_processes(identify):
        yield MachineProcess(pid, pidfd, directory, slot_number)


def _find_claimed_directory(pid: int, root: Path) -> Path | None:
    """Return the directory in ``root`` that contains the memory file in the command line of a process, if any."""
    for argument in process_checks.read_arguments(pid):
        if f"mem-path={root}/" in argument:
            directory = Path(argument.split("mem-path=", 1)[1].split(",", 1)[0]).parent
            return directory if directory.parent.parent == root else None
    return None


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
                env=build_child_environment(),
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
