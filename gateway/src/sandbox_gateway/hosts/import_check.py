"""Check whether a disk that was exported on another host can be used on this one."""

from __future__ import annotations

import os

from sandbox_gateway.errors import Unsupported


def require_compatible_origin(host_kind: str, architecture: str, *, kind: str) -> None:
    """Raise Unsupported unless a host of ``kind`` on this machine can boot disks of the other host.

    ``host_kind`` and ``architecture`` describe the other host.
    """
    require_same_host_kind(host_kind, kind=kind)
    own_architecture = os.uname().machine
    if architecture != own_architecture:
        raise Unsupported(
            f"the snapshot requires a host for {architecture}, but this host is for {own_architecture}: use a host for "
            f"{architecture}"
        )


def require_same_host_kind(host_kind: str, *, kind: str) -> None:
    """Raise Unsupported unless the other host is of the same ``kind`` as this one."""
    if host_kind != kind:
        raise Unsupported(
            f"the snapshot comes from a {host_kind} host, but this is a {kind} host: use a {host_kind} host"
        )
