"""Create, enter and remove network namespaces.

Each thread can be in a different network namespace. Long operations in a namespace run in a new thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netns import setns

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.network.addresses import RUN_NETNS
from sandbox_gateway.hosts.threads import start_thread

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED, _MNT_DETACH = 0x1000, 0x4000, 0x100000, 2

HOST_NAMESPACE = Path("/proc/self/ns/net")
"""The network namespace of the process, even if the thread is in a different one."""

_T = TypeVar("_T")
_libc = ctypes.CDLL(None, use_errno=True)


async def run_in_thread(work: Callable[..., _T], *arguments: Any) -> _T:
    """Run ``work`` in a new thread, so that it does not change the namespace of any other thread.

    ``work`` is completed even if the caller is cancelled. Raises BackendFailed if the kernel refuses an operation.
    """

    def run() -> _T:
        try:
            return work(*arguments)
        except (OSError, NetlinkError) as error:
            raise BackendFailed(
                f"the network could not be set up ({error}): run the gateway as root, on a kernel with "
                "veth, tun and nf_tables"
            ) from None

    return await asyncio.shield(start_thread(run, name="netns"))


def enter_new_namespace(path: Path) -> None:
    """Create a network namespace without IPv6, bind it to the file ``path``, and move this thread into it."""
    _check_result("unshare", _libc.unshare(_CLONE_NEWNET))
    path.touch(mode=0o444, exist_ok=False)
    _mount("/proc/thread-self/ns/net", path, _MS_BIND)
    for interface in ("all", "default"):
        set_sysctl(f"net/ipv6/conf/{interface}/disable_ipv6", "1", required=False)


def remove_namespace(path: Path) -> None:
    """Remove a namespace's file, if it exists. Processes in the namespace keep running in it."""
    # Unmount until EINVAL, which means that no mount remains at the path.
    while _libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
        pass
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def in_namespace(namespace: Path) -> Iterator[None]:
    """Run the body of this context in ``namespace``. Raises BackendFailed."""
    with Path("/proc/thread-self/ns/net").open("rb") as previous_namespace, namespace.open("rb") as target_namespace:
        _enter(target_namespace.fileno())
        try:
            yield
        finally:
            _enter(previous_namespace.fileno())


def _enter(namespace: int) -> None:
    try:
        setns(namespace)  # Affects only the calling thread, like setns(2).
    except OSError as error:
        raise BackendFailed(
            f"a network namespace cannot be entered ({os.strerror(error.errno or 0)}): run the gateway as root"
        ) from None


def share_run_netns() -> None:
    """Make /run/netns a shared mount, as iproute2 does, so that its files appear in every mount namespace."""
    RUN_NETNS.mkdir(mode=0o755, parents=True, exist_ok=True)
    if _libc.mount(b"none", os.fsencode(RUN_NETNS), b"none", _MS_SHARED | _MS_REC, None) != 0:
        _mount(RUN_NETNS, RUN_NETNS, _MS_BIND | _MS_REC)
        _mount("none", RUN_NETNS, _MS_SHARED | _MS_REC)


def _mount(source: str | Path, target: Path, flags: int) -> None:
    _check_result(f"mount {target}", _libc.mount(os.fsencode(source), os.fsencode(target), b"none", flags, None))


def list_mounted_namespaces() -> list[str]:
    """Return the names of the namespaces in /run/netns. Skips plain files, which a crash may leave there."""
    names = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "nsfs" and Path(fields[4]).parent == RUN_NETNS:
            names.append(Path(fields[4]).name)
    return names


def set_sysctl(name: str, value: str, *, required: bool = True) -> None:
    """Set a sysctl in this thread's network namespace. Unless ``required``, ignore a sysctl that the kernel lacks."""
    try:
        Path("/proc/sys", name).write_text(value)
    except FileNotFoundError:
        if required:
            raise


def _check_result(operation: str, result: int) -> None:
    if result != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{operation}: {os.strerror(error_number)}")
