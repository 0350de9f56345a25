"""Start QEMU processes in network namespaces, and find running ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sandbox_gateway.command import child_environment
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import in_namespace


def list_running(root: str) -> Iterator[tuple[int, str, Path]]:
    """Yield (pid, label, path of the memory file) for each QEMU process whose memory file is below ``root``."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            memory_option = next((argument for argument in arguments if f"mem-path={root}/" in argument), None)
            if memory_option and "-name" in arguments:
                path = memory_option.split("mem-path=", 1)[1].split(",", 1)[0]
                yield int(entry.name), arguments[arguments.index("-name") + 1], Path(path)


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
