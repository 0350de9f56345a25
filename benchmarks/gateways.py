"""Run a gateway process next to this process's engine, with the same file system, templates and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.context import KvmXfs
from tests.support.gateway import PROGRAM, Gateway


@contextlib.contextmanager
def gateway_beside(host: KvmXfs, program: Sequence[str] = PROGRAM, **more: dict[str, Any]) -> Iterator[Gateway]:
    """Run a gateway with ``host``'s configuration plus ``more`` sections. Removes its sandboxes at the end."""
    sections = host.config.model_dump(mode="json")
    wanted = {"kvm_xfs": sections["kvm_xfs"], "network": {"pool": host.config.network.pool}, "log": {"level": "info"}}
    gateway = Gateway(host.mount_point, wanted | more, program=program)
    host.share_templates(gateway.state_root)
    try:
        gateway.start()
        yield gateway
    finally:
        if problems := gateway.end():
            raise RuntimeError("; ".join(problems))
