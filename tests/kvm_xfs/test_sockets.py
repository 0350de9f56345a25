"""Test connections to the monitor of a machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.qemu.sockets import connect_to_path, listen_on_path


def test_a_machine_that_accepts_no_connection_does_not_block(tmp_path: Path) -> None:
    """Otherwise, one hung QEMU process would block the whole gateway."""
    outcomes: list[str] = []

    def connect_repeatedly(connections: contextlib.ExitStack) -> None:
        for _ in range(20):
            try:
                connection = connections.enter_context(connect_to_path(tmp_path / "socket"))
                outcomes.append("non-blocking" if not connection.getblocking() else "blocking")
            except BlockingIOError:
                outcomes.append("refused")

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listen_on_path(listener, tmp_path / "socket")
        thread = threading.Thread(target=connect_repeatedly, args=(stack,), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), outcomes
    accepted_count = outcomes.count("non-blocking")
    assert accepted_count >= 4 and outcomes == ["non-blocking"] * accepted_count + ["refused"] * (20 - accepted_count)
