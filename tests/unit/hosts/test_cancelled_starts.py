"""A cancelled start of a virtual machine leaves nothing behind, even if a thread is still working on it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.kvm_xfs.files import instances
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.qemu import machine
from sandbox_gateway.records import Sandbox, Snapshot


async def _cancel_repeatedly(task: asyncio.Task[Any]) -> None:
    for _ in range(2):
        await asyncio.sleep(0.03)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start_slowly(*_: object) -> int:
        time.sleep(0.15)
        processes.append(subprocess.Popen(["sleep", "60"]))
        return processes[0].pid

    monkeypatch.setattr(machine, "start_in_namespace", start_slowly)
    monkeypatch.setattr(machine, "build_arguments", lambda *_, **__: [])
    monkeypatch.setattr(machine, "clear_append_flag", lambda _: True)
    files = cast("Any", SimpleNamespace(directory=tmp_path, qmp=tmp_path / "qmp"))
    shape = cast("Any", SimpleNamespace(netns=tmp_path))

    async def run_scenario() -> None:
        await _cancel_repeatedly(asyncio.create_task(machine.Machine.spawn(shape, files, state=None)))

    try:
        asyncio.run(run_scenario())
        time.sleep(0.2)
        assert [Path(f"/proc/{process.pid}").exists() for process in processes] == [False]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_cancelled_start_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created_directories: list[Path] = []

    def create_slowly(_: Any, files: Any, *__: object) -> None:
        time.sleep(0.15)
        files.directory.mkdir(parents=True)
        (files.directory / "rootfs.img").touch()
        created_directories.append(files.directory)

    monkeypatch.setattr(instances, "create_files", create_slowly)
    host = KvmXfsHost(Config.model_validate({"host": {"state_root": str(tmp_path)}}))

    async def run_scenario() -> None:
        await _cancel_repeatedly(asyncio.create_task(host.fork(Snapshot(), Sandbox(name="a"), with_memory=False)))
        await asyncio.sleep(0.2)

    asyncio.run(run_scenario())
    (directory,) = created_directories
    assert not directory.exists() and not directory.parent.exists()
