"""Check whether a disk that was exported on another host can be used on this one."""

from __future__ import annotations

import os

from sandbox_gateway.errors import Unsupported


def require_origin(host_kind: str, architecture: str, *, kind: str) -> None:
    """Raise Unsupported unless a host of ``kind`` on this machine can boot disks of the other host.

    ``host_kind`` and ``architecture``: those of the other host.
    """
    if host_kind != kind:
        raise Unsupported(
            f"the snapshot file comes from a {host_kind} host, but this is a {kind} host: import it on a {host_kind} "
            "host"
        )
    own = os.uname().machine
    if architecture != own:
        raise Unsupported(
            f"the snapshot is of a machine for {architecture}, but this host is for {own}: import it on a host for "
            f"{architecture}"
        )
