"""Root in a sandbox tries to fill the gateway's memory with data that the gateway stores."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gateway.api.metrics import Metrics
from sandbox_gateway.engine.builds import Build, LogWriter
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from tests.support.memory_engine import opened_engine

MB = 1 << 20
CLOCK_EVENT = {"event": "RTC_CHANGE", "data": {"offset": 1}, "timestamp": {"seconds": 1, "microseconds": 1}}
"""The event that a guest causes when it sets its clock."""
EVENT_COUNT = 2000


async def test_machine_events_are_not_stored(tmp_path: Path) -> None:
    instance = InstanceFiles(tmp_path)
    instance.run.mkdir()

    async def serve_fake_qemu(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        version = {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}
        writer.write(json.dumps({"QMP": {"version": version, "capabilities": []}}).encode() + b"\n")
        await reader.read(4096)
        writer.write(b'{"return": {}}\n')
        while request := await reader.read(4096):
            writer.write((json.dumps(CLOCK_EVENT) + "\n").encode() * EVENT_COUNT)
            writer.write(json.dumps({"return": {}, "id": json.loads(request)["id"]}).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(serve_fake_qemu, instance.qmp)
    machine = Machine(os.getpid(), instance)
    try:
        await machine.execute("query-status")
        assert machine._qmp is not None
        assert (machine._qmp.events.empty(), machine._qmp.events.history) == (True, ())
    finally:
        await machine.detach()
        machine.forget()
        server.close()


def measure_peak_allocation(work: Callable[[], None]) -> int:
    """Return the peak memory that ``work`` allocates, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_output_of_a_setup_command_is_bounded() -> None:
    """The output is endless. The last lines are kept, because they explain the failure."""
    build = Build("", [], "")

    def attack() -> None:
        writer = LogWriter(build)
        for _ in range(1000):
            writer.feed(b"x" * 65536)
        for number in range(2000):
            writer.feed(b"\n" * 50 + b"line %d\n" % number)
        writer.feed(b"why\n")
        writer.flush()

    assert measure_peak_allocation(attack) < 8 * MB
    build.end("error")
    assert sum(map(sys.getsizeof, build.lines)) < 2 * MB
    assert build.lines[0].startswith("xxx") and build.lines[-1] == "why"
    assert any("omitted" in line for line in build.lines)


def test_a_short_build_log_is_complete() -> None:
    build = Build("", [], "")
    writer = LogWriter(build)
    for piece in (b"a", b"b\nc", b"\n", b"d"):
        writer.feed(piece)
    writer.flush()
    build.end("ready")
    assert build.lines == ["ab", "c", "d"]


@pytest.mark.anyio
async def test_unknown_statuses_share_one_metric_label(tmp_path: Path) -> None:
    async with opened_engine(tmp_path) as engine:
        metrics = Metrics(engine)
        for status in range(200, 600):
            metrics.record_request("GET", "data plane", status, 0.1)
        metrics_text = metrics.render().decode()
    metric_lines = [
        line for line in metrics_text.splitlines() if line.startswith("sandbox_gateway_request_seconds_count")
    ]
    assert len(metric_lines) < 70
    assert any('status="404"' in line for line in metric_lines) and any(
        'status="other"' in line for line in metric_lines
    )
