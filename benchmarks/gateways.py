"""Run a gateway in a separate process, with the file system, templates and settings of this process's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.context import KvmXfs
from tests.support.gateway import PROGRAM, Gateway


@contextlib.contextmanager
def companion_gateway(host: KvmXfs, program: Sequence[str] = PROGRAM, **sections: dict[str, Any]) -> Iterator[Gateway]:
    """Run a gateway with the configuration of ``host``. Each of ``sections`` overrides the section with its name.

    Removes the sandboxes of the gateway at the end.
    """
    config = host.config.model_dump(mode="json", exclude_none=True)
    base_config = {
        "kvm_xfs": config["kvm_xfs"],
        "network": {"pool": host.config.network.pool},
        "log": {"level": "info"},
    }
    gateway = Gateway(host.mount_point, base_config | sections, program=program)
    host.copy_templates(gateway.state_root)
    try:
        gateway.start()
        yield gateway
    finally:
        if problems := gateway.end():
            raise RuntimeError("; ".join(problems))
