"""Start a gateway that considers every running sandbox diverged, as if all guests wrote all the time.

The plan for a sandbox depends on whether it has diverged, but real guests write to their disks at unpredictable
times.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import Sandbox, Snapshot
from sandbox_gateway.server.daemon import main

BUSY_PROGRAM = (sys.executable, str(Path(__file__)))


async def _has_diverged(host: object, sandbox: Sandbox, head: Snapshot) -> bool:
    return True


if __name__ == "__main__":
    for host_class in (JailZfsHost, KvmXfsHost):
        host_class.has_diverged = _has_diverged  # type: ignore[method-assign, assignment]
    main()
