"""Test the host's operations with a memory root that is unmounted and mounted again. Its machines are this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import Memory, Resources, Sandbox, Snapshot, SnapshotKind
from tests.kvm_xfs.process_host import make_host
from tests.support.xfs import LoopXfs


@pytest.fixture
def state(need_root: None, tmp_path: Path) -> Iterator[LoopXfs]:
    with LoopXfs(tmp_path / "state.xfs", tmp_path / "state", size_mb=512) as xfs:
        yield xfs


@pytest.fixture(params=[True, False], ids=["reflink", "no-reflink"])
def root(request: pytest.FixtureRequest, need_root: None, tmp_path: Path) -> Iterator[LoopXfs]:
    with LoopXfs(tmp_path / "root.xfs", tmp_path / "root", size_mb=512, reflink=request.param) as xfs:
        yield xfs


@pytest.fixture
def host(state: LoopXfs, root: LoopXfs) -> Iterator[KvmXfsHost]:
    kvm_xfs = {"memory_root": root.mount_point, "memory_mode": "compare"}
    host = make_host(Config.model_validate({"host": {"state_root": state.mount_point}, "kvm_xfs": kvm_xfs}))
    yield host
    stop_all(host)


def machines_of(host: KvmXfsHost) -> dict[str, Any]:
    running: dict[str, Any] = host._machines.running  # type: ignore[attr-defined]
    return running


def stop_all(host: KvmXfsHost) -> None:
    for machine in machines_of(host).values():
        machine.memory.close()
    machines_of(host).clear()


def start_source(host: KvmXfsHost) -> Sandbox:
    """Create a base and a sandbox that booted from it. The start of its memory contains "secret"."""
    base = Snapshot(kind=SnapshotKind.BASE, resources=Resources(memory_mb=64, disk_mb=64))
    files = host._snapshots.partial_files(base)
    files.directory.mkdir()
    for path in (files.disk, files.kernel, files.initrd):
        path.write_bytes(b"x" * 4096)
    host._snapshots.commit(base)
    source = Sandbox(name="source", resources=base.resources)
    asyncio.run(host.fork(base, source, with_memory=False))
    asyncio.run(host.save(source))
    machines_of(host)[source.instance].memory[:6] = b"secret"
    return source


def fork(host: KvmXfsHost, snapshot: Snapshot, *, with_memory: bool = True) -> tuple[Sandbox, bytes]:
    """Fork a snapshot, and return the start of the new machine's memory."""
    sandbox = Sandbox(name="fork", resources=snapshot.resources)
    asyncio.run(host.fork(snapshot, sandbox, with_memory=with_memory))
    return sandbox, machines_of(host)[sandbox.instance].memory[:6]


def capture(host: KvmXfsHost, sandbox: Sandbox, *, memory: bool = True) -> Snapshot:
    return asyncio.run(host.capture(sandbox, Snapshot(), memory=memory))


def test_forks_of_forks_have_the_captured_memory(host: KvmXfsHost) -> None:
    sandbox = start_source(host)
    for _ in range(3):
        sandbox, start = fork(host, capture(host, sandbox))
        assert start == b"secret"


def test_an_unmounted_root_refuses_memory_only_and_everything_works_again_after_mounting(
    host: KvmXfsHost, state: LoopXfs, root: LoopXfs
) -> None:
    snapshot = capture(host, start_source(host))
    stop_all(host)
    root.unmount()
    try:
        with pytest.raises(
            Conflict, match=rf"memory of snapshot {snapshot.id} is not available: .* not mounted.*\. Mount .*coldStart"
        ):
            fork(host, snapshot)
        assert machines_of(host) == {}
        cold, start = fork(host, snapshot, with_memory=False)
        assert start == bytes(6)
        with pytest.raises(Conflict, match=r"the memory root .* is not available: .*\. Mount it, or"):
            capture(host, cold)
        assert capture(host, cold, memory=False).memory is Memory.NONE
        room = asyncio.run(host.room())
        assert room.memory_disk is not None and "not mounted" in room.memory_disk.problem
        scan = asyncio.run(make_host(host._config).scan())
        assert snapshot.id in {each.id for each in scan.snapshots}
        assert not (state.mount_point / ".damaged").exists() and list(root.mount_point.iterdir()) == []
    finally:
        root.mount()
    assert host.memory_problem(snapshot) == ""
    assert fork(host, snapshot)[1] == b"secret"
    room = asyncio.run(host.room())
    assert room.memory_disk is not None and room.memory_disk.free > 0


def test_removing_everything_leaves_an_empty_root(host: KvmXfsHost, root: LoopXfs) -> None:
    source = start_source(host)
    snapshot = capture(host, source)
    forked, _ = fork(host, snapshot)
    second = capture(host, forked)
    assert host._layout.instance(source).last_memory.is_symlink()
    for each in (snapshot, second):
        asyncio.run(host.remove_snapshot(each))
    assert sum(path.is_file() for path in root.mount_point.rglob("*")) == 3, "held by the machines"
    stop_all(host)
    asyncio.run(host.discard(forked))
    asyncio.run(host.remove(source))
    assert not [path for path in root.mount_point.rglob("*") if path.is_file()]
