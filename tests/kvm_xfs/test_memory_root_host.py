"""Test the host's operations while its memory root is unmounted and after it is remounted, with simulated machines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.errors import Conflict
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, Snapshot, SnapshotKind
from tests.kvm_xfs.process_host import make_host
from tests.support.xfs import LoopXfs


@pytest.fixture
def state_xfs(requires_root: None, tmp_path: Path) -> Iterator[LoopXfs]:
    with LoopXfs(tmp_path / "state.xfs", tmp_path / "state", size_mb=512) as xfs:
        yield xfs


@pytest.fixture(params=[True, False], ids=["reflink", "no-reflink"])
def root_xfs(request: pytest.FixtureRequest, requires_root: None, tmp_path: Path) -> Iterator[LoopXfs]:
    with LoopXfs(tmp_path / "root.xfs", tmp_path / "root", size_mb=512, reflink=request.param) as xfs:
        yield xfs


@pytest.fixture
def host(state_xfs: LoopXfs, root_xfs: LoopXfs) -> Iterator[KvmXfsHost]:
    kvm_xfs = {"memory_root": root_xfs.mount_point, "memory_mode": "compare"}
    host = make_host(Config.model_validate({"host": {"state_root": state_xfs.mount_point}, "kvm_xfs": kvm_xfs}))
    yield host
    stop_machines(host)


def get_machines(host: KvmXfsHost) -> dict[str, Any]:
    machines: dict[str, Any] = host._machines.running  # type: ignore[attr-defined]
    return machines


def stop_machines(host: KvmXfsHost) -> None:
    for machine in get_machines(host).values():
        machine.memory.close()
    get_machines(host).clear()


def start_source(host: KvmXfsHost) -> Sandbox:
    """Create a base, boot a sandbox from it, and write "secret" to the start of the sandbox's memory."""
    base = Snapshot(kind=SnapshotKind.BASE, resources=Resources(memory_mb=64, disk_mb=64))
    files = host._snapshots.partial_files(base)
    files.directory.mkdir()
    for path in (files.disk, files.kernel, files.initrd):
        path.write_bytes(b"x" * 4096)
    host._snapshots.commit(base)
    source = Sandbox(name="source", resources=base.resources)
    asyncio.run(host.fork(base, source, with_memory=False))
    asyncio.run(host.save(source))
    get_machines(host)[source.instance].memory[:6] = b"secret"
    return source


def fork_snapshot(host: KvmXfsHost, snapshot: Snapshot, *, with_memory: bool = True) -> tuple[Sandbox, bytes]:
    """Fork a snapshot, and return the new sandbox and the first 6 bytes of its memory."""
    sandbox = Sandbox(name="fork", resources=snapshot.resources)
    asyncio.run(host.fork(snapshot, sandbox, with_memory=with_memory))
    return sandbox, get_machines(host)[sandbox.instance].memory[:6]


def capture_sandbox(host: KvmXfsHost, sandbox: Sandbox, *, memory: bool = True) -> Snapshot:
    return asyncio.run(host.capture(sandbox, Snapshot(), memory=memory))


def test_forks_of_forks_have_the_captured_memory(host: KvmXfsHost) -> None:
    sandbox = start_source(host)
    for _ in range(3):
        sandbox, memory_start = fork_snapshot(host, capture_sandbox(host, sandbox))
        assert memory_start == b"secret"


def test_only_operations_on_memory_fail_while_the_root_is_unmounted(
    host: KvmXfsHost, state_xfs: LoopXfs, root_xfs: LoopXfs
) -> None:
    snapshot = capture_sandbox(host, start_source(host))
    stop_machines(host)
    root_xfs.unmount()
    try:
        with pytest.raises(
            Conflict, match=rf"memory of snapshot {snapshot.id} is not available: .* not mounted.*\. Mount .*coldStart"
        ):
            fork_snapshot(host, snapshot)
        assert get_machines(host) == {}
        cold_fork, memory_start = fork_snapshot(host, snapshot, with_memory=False)
        assert memory_start == bytes(6)
        with pytest.raises(Conflict, match=r"the memory root .* is not available: .*\. Mount it, or"):
            capture_sandbox(host, cold_fork)
        assert capture_sandbox(host, cold_fork, memory=False).memory is MemoryMode.NONE
        room = asyncio.run(host.measure_room())
        assert room.memory_disk is not None and "not mounted" in room.memory_disk.problem
        scan = asyncio.run(make_host(host._config).scan())
        assert snapshot.id in {each.id for each in scan.snapshots}
        assert not (state_xfs.mount_point / ".damaged").exists() and list(root_xfs.mount_point.iterdir()) == []
    finally:
        root_xfs.mount()
    assert host.find_memory_problem(snapshot) == ""
    assert fork_snapshot(host, snapshot)[1] == b"secret"
    room = asyncio.run(host.measure_room())
    assert room.memory_disk is not None and room.memory_disk.free > 0


def test_removing_everything_leaves_an_empty_root(host: KvmXfsHost, root_xfs: LoopXfs) -> None:
    source = start_source(host)
    snapshot = capture_sandbox(host, source)
    forked_sandbox, _ = fork_snapshot(host, snapshot)
    second_snapshot = capture_sandbox(host, forked_sandbox)
    assert host._layout.instance(source).last_memory.is_symlink()
    for each in (snapshot, second_snapshot):
        asyncio.run(host.remove_snapshot(each))
    assert sum(path.is_file() for path in root_xfs.mount_point.rglob("*")) == 3, "the machines do not hold their images"
    stop_machines(host)
    asyncio.run(host.discard(forked_sandbox))
    asyncio.run(host.remove(source))
    assert not [path for path in root_xfs.mount_point.rglob("*") if path.is_file()]
