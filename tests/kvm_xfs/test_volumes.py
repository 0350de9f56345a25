"""Test the files of volumes on an XFS file system after each operation, each failure, and a crash at any step.

The servers are fakes that record calls and fail on request. test_volumes_live.py uses real servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import BackendFailed, Busy, Conflict, GatewayError, NoSpace, NotFound
from sandbox_gateway.hosts.base import GuestMount, Scan
from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.volumes import kvm_volumes, ports, store
from sandbox_gateway.hosts.kvm_xfs.volumes.kvm_volumes import KvmVolumes
from sandbox_gateway.hosts.kvm_xfs.volumes.ports import Ports
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import Mount, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from tests.support.crash import KILLED_EXIT_CODE, StepCounter
from tests.support.xfs import LoopXfs

SIZE_MB = 64
_numbers = itertools.count(1)


def get_size_on_disk(image: Path) -> int:
    """Return the number of bytes that an image uses on disk."""
    return image.stat().st_blocks * 512


class FakeServerPool(ServerPool):
    """A server pool that records calls. ``failing_calls`` contains (operation, volume) of each call that fails."""

    def __init__(self) -> None:
        self.clients: dict[str, dict[str, bool]] = {}
        self.frozen_volumes: set[str] = set()
        self.largest_frozen_set: set[str] = set()
        """The largest set of volumes that were frozen at the same time."""
        self.calls: list[tuple[str, str]] = []
        self.failing_calls: set[tuple[str, str]] = set()
        self.known_volumes: set[str] = set()

    def _record_call(self, operation: str, volume: str) -> None:
        self.calls.append((operation, volume))
        if (operation, volume) in self.failing_calls:
            raise BackendFailed(f"{operation} refused")

    async def open(self, known_volumes: set[str]) -> list[str]:
        self.known_volumes = known_volumes
        return []

    async def close(self) -> None:
        pass

    async def serve(self, volume: str, image: Path, port: int, clients: Mapping[str, bool]) -> None:
        self._record_call("serve", volume)
        assert get_size_on_disk(image) and port in VOLUME_PORTS
        self.clients[volume] = dict(clients)

    async def stop(self, volume: str) -> None:
        self._record_call("stop", volume)
        self.clients.pop(volume, None)

    @contextlib.asynccontextmanager
    async def frozen(self, volume: str) -> AsyncIterator[None]:
        self._record_call("freeze", volume)
        self.frozen_volumes.add(volume)
        self.largest_frozen_set = max(self.largest_frozen_set, set(self.frozen_volumes), key=len)
        try:
            yield
        finally:
            self.frozen_volumes.discard(volume)
            self._record_call("thaw", volume)

    async def flush(self, volume: str) -> None:
        self._record_call("flush", volume)

    async def grow(self, volume: str) -> None:
        self._record_call("grow", volume)

    async def count_used_bytes(self, volume: str, image: Path) -> int:
        self._record_call("count_used_bytes", volume)
        return get_size_on_disk(image)

    def mounts(self, volume: str, port: int, path: str, read_only: bool) -> GuestMount:
        return GuestMount(path, f"{port}:{volume}", "nfs", "", read_only)


class VolumeHost(KvmVolumes):
    """The volumes of a host whose machines exist only as entries in ``addresses``."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        self.layout.create()
        self.servers = FakeServerPool()
        self.addresses: dict[str, str] = {}
        super().__init__(self.layout, Quarantine(root), self.servers)

    async def scan(self, *sandboxes: Sandbox, snapshots: tuple[str, ...] = ()) -> Scan:
        scan = Scan(sandboxes=list(sandboxes), snapshots=[Snapshot(id=each) for each in snapshots])
        await self.find(scan)
        await self.adopt(scan, self.addresses)
        return scan

    async def start_machine(self, sandbox: Sandbox, address: str) -> None:
        self.addresses[sandbox.instance] = address
        await self.allow(sandbox, sandbox.mounts, address)

    def stop_machine(self, sandbox: Sandbox, on_release: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        del self.addresses[sandbox.instance]
        return self.revoke_all(sandbox.instance, on_release)

    async def capture_sandbox(self, snapshot: Snapshot, captures: list[VolumeSnapshot]) -> None:
        """Capture a sandbox as a host does: capture its volumes, then commit the sandbox's snapshot."""
        async with self.pending_snapshots(captures) as pending:
            await pending.clone_images()
            await pending.commit()
            final_directory = self.layout.snapshot(snapshot).directory
            commit_protocol.get_partial_directory(final_directory).mkdir()
            record_files.write_record(commit_protocol.get_partial_directory(final_directory), snapshot)
            commit_protocol.commit(final_directory)

    async def wait_for_background_tasks(self) -> None:
        """Wait until all background tasks have finished."""
        await self._background.wait()


@pytest.fixture
def root(xfs_root: Path) -> Iterator[Path]:
    path = xfs_root / f"volumes-{next(_numbers)}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(root: Path) -> VolumeHost:
    return VolumeHost(root)


async def reopen(host: VolumeHost, *sandboxes: Sandbox, snapshots: tuple[str, ...] = ()) -> tuple[VolumeHost, Scan]:
    """Open the state of ``host`` as the next gateway does, and return the new host and the result of its scan."""
    reopened_host = VolumeHost(host.layout.root)
    reopened_host.addresses = host.addresses
    return reopened_host, await reopened_host.scan(*sandboxes, snapshots=snapshots)


def make_volume(name: str = "data", size_mb: int = SIZE_MB) -> Volume:
    return Volume(name=name, size_mb=size_mb)


def make_snapshot(volume: Volume, name: str = "first", *, sandbox_snapshot: str = "") -> VolumeSnapshot:
    return VolumeSnapshot(name=name, volume=volume.id, size_mb=volume.size_mb, sandbox_snapshot=sandbox_snapshot)


def make_sandbox(*mounts: Mount) -> Sandbox:
    return Sandbox(name=f"box{next(_numbers)}", mounts=list(mounts), host={})


def get_image_path(host: VolumeHost, volume: Volume) -> Path:
    return host.layout.volumes / volume.id / "volume.img"


def get_snapshot_image_path(host: VolumeHost, snapshot: VolumeSnapshot) -> Path:
    return host.layout.volumes / snapshot.volume / "snapshots" / snapshot.id / "volume.img"


def write_file(image: Path, name: str, text: str) -> None:
    """Write a file into an image that no server uses."""
    text_file = image.with_name(f"note-{os.getpid()}")
    text_file.write_text(text)
    commands = f"rm {name}\nwrite {text_file} {name}\n"
    subprocess.run(["debugfs", "-w", "-f", "-", str(image)], input=commands, text=True, capture_output=True, timeout=20)
    text_file.unlink()
    assert read_file(image, name) == text


def read_file(image: Path, name: str) -> str:
    """Return the text of a file, or "" if the file does not exist."""
    argv = ["debugfs", "-R", f"cat /{name}", str(image)]
    return subprocess.run(argv, text=True, capture_output=True, timeout=20).stdout


def read_root_mode(image: Path) -> str:
    """Return the mode of the root directory in an image as an octal number."""
    listing = subprocess.run(
        ["debugfs", "-R", "ls -p /", str(image)], text=True, capture_output=True, timeout=20
    ).stdout
    modes = {line.split("/")[5]: line.split("/")[2] for line in listing.splitlines() if line.startswith("/")}
    return modes["."]


def has_intact_file_system(image: Path) -> bool:
    return subprocess.run(["e2fsck", "-fn", str(image)], capture_output=True, timeout=60).returncode == 0


def list_stray_files(host: VolumeHost) -> list[str]:
    return sorted(str(path.relative_to(host.layout.root)) for path in host.layout.volumes.glob("**/.partial*"))


async def _wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# -- files of volumes --------------------------------------------------------------------------------------------------


async def test_a_new_volume_is_small_and_writable_by_all_users(host: VolumeHost) -> None:
    volume = make_volume(size_mb=1024)
    await host.create(volume)
    path = get_image_path(host, volume)
    assert path.stat().st_size == 1024 << 20 and get_size_on_disk(path) < 64 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    assert has_intact_file_system(path)
    assert read_root_mode(path) == "040777"
    assert volume.host["port"] in VOLUME_PORTS
    _, scan = await reopen(host)
    assert scan.volumes == [volume] and not scan.repaired and not list_stray_files(host)


async def test_a_snapshot_has_the_contents_of_the_volume(host: VolumeHost) -> None:
    volume = make_volume()
    await host.create(volume)
    write_file(get_image_path(host, volume), "a", "one")
    snapshot = make_snapshot(volume)
    await host.capture(snapshot)
    assert reflink.count_unique_bytes(get_snapshot_image_path(host, snapshot)) == 0
    write_file(get_image_path(host, volume), "a", "two")
    assert read_file(get_snapshot_image_path(host, snapshot), "a") == "one"
    assert [operation for operation, _ in host.servers.calls] == ["flush", "freeze", "thaw"]
    _, scan = await reopen(host)
    assert scan.volume_snapshots == [snapshot] and not scan.repaired
    await host.remove_snapshot(snapshot)
    assert not get_snapshot_image_path(host, snapshot).parent.exists() and not list_stray_files(host)


async def test_a_clone_has_the_contents_of_the_snapshot_and_may_be_larger(host: VolumeHost) -> None:
    volume, clone = make_volume(), make_volume("clone", 2 * SIZE_MB)
    await host.create(volume)
    write_file(get_image_path(host, volume), "a", "one")
    snapshot = make_snapshot(volume)
    await host.capture(snapshot)
    await host.create(clone, snapshot)
    assert get_image_path(host, clone).stat().st_size == 2 * SIZE_MB << 20
    assert read_file(get_image_path(host, clone), "a") == "one"
    assert clone.host["port"] != volume.host["port"]
    await host.remove(volume)
    assert read_file(get_image_path(host, clone), "a") == "one"


async def test_removing_a_volume_removes_its_snapshots(host: VolumeHost) -> None:
    volume = make_volume()
    await host.create(volume)
    await host.capture(make_snapshot(volume))
    await host.remove(volume)
    assert not list(host.layout.volumes.iterdir())
    await host.wait_for_background_tasks()
    assert host.servers.calls[-1] == ("stop", volume.id)
    with pytest.raises(NotFound):
        await host.state(volume)


async def test_growing_a_volume_updates_the_server_and_the_record(host: VolumeHost) -> None:
    volume = make_volume()
    await host.create(volume)
    await host.grow(volume, 3 * SIZE_MB)
    assert volume.size_mb == 3 * SIZE_MB and get_image_path(host, volume).stat().st_size == 3 * SIZE_MB << 20
    assert host.servers.calls == [("grow", volume.id)]
    _, scan = await reopen(host)
    assert scan.volumes == [volume] and not scan.repaired


async def test_growth_that_the_server_refuses_can_be_retried(host: VolumeHost) -> None:
    volume = make_volume()
    await host.create(volume)
    host.servers.failing_calls = {("grow", volume.id)}
    with pytest.raises(BackendFailed):
        await host.grow(volume, 2 * SIZE_MB)
    assert volume.size_mb == SIZE_MB
    host.servers.failing_calls.clear()
    await host.grow(volume, 2 * SIZE_MB)
    assert volume.size_mb == 2 * SIZE_MB and get_image_path(host, volume).stat().st_size == 2 * SIZE_MB << 20


# -- rollback ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def volume_snapshot_and_sandbox(host: VolumeHost) -> tuple[Volume, VolumeSnapshot, Sandbox]:
    """A volume that contains "two", a snapshot of it that contains "one", and a sandbox that mounts the volume."""
    volume = make_volume()
    await host.create(volume)
    write_file(get_image_path(host, volume), "a", "one")
    snapshot = make_snapshot(volume)
    await host.capture(snapshot)
    write_file(get_image_path(host, volume), "a", "two")
    sandbox = make_sandbox(Mount(volume=volume.id, path="/data"))
    await host.start_machine(sandbox, "10.0.0.2")
    host.servers.calls.clear()
    return volume, snapshot, sandbox


async def test_rollback_restores_the_files_and_the_clients(
    host: VolumeHost, volume_snapshot_and_sandbox: tuple[Volume, VolumeSnapshot, Sandbox]
) -> None:
    volume, snapshot, _ = volume_snapshot_and_sandbox
    await host.rollback(volume, snapshot)
    assert read_file(get_image_path(host, volume), "a") == "one"
    assert host.servers.calls == [("stop", volume.id), ("serve", volume.id)]
    assert host.servers.clients == {volume.id: {"10.0.0.2": False}}
    write_file(get_image_path(host, volume), "a", "three")
    assert read_file(get_snapshot_image_path(host, snapshot), "a") == "one"
    assert not list_stray_files(host)


async def test_a_grown_volume_keeps_its_size_after_a_rollback(
    host: VolumeHost, volume_snapshot_and_sandbox: tuple[Volume, VolumeSnapshot, Sandbox]
) -> None:
    volume, snapshot, _ = volume_snapshot_and_sandbox
    await host.grow(volume, 2 * SIZE_MB)
    await host.rollback(volume, snapshot)
    assert read_file(get_image_path(host, volume), "a") == "one"
    assert (volume.size_mb, get_image_path(host, volume).stat().st_size) == (2 * SIZE_MB, 2 * SIZE_MB << 20)
    _, scan = await reopen(host)
    assert scan.volumes == [volume] and not scan.repaired


@pytest.mark.parametrize("failing_operation", ["stop", "serve"])
async def test_a_failed_rollback_preserves_the_volume_and_its_clients(
    host: VolumeHost,
    volume_snapshot_and_sandbox: tuple[Volume, VolumeSnapshot, Sandbox],
    failing_operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvm_volumes, "_RETRY_DELAYS_SECONDS", (0.01,))
    volume, snapshot, _ = volume_snapshot_and_sandbox

    host.servers.failing_calls = {(failing_operation, volume.id)}
    with pytest.raises(BackendFailed, match=f"{failing_operation} refused"):
        await host.rollback(volume, snapshot)
    assert read_file(get_image_path(host, volume), "a") == "two"
    host.servers.failing_calls.clear()
    await host.wait_for_background_tasks()
    assert host.servers.clients == {volume.id: {"10.0.0.2": False}}
    assert not list_stray_files(host)


async def test_a_rollback_without_space_changes_nothing(
    host: VolumeHost,
    volume_snapshot_and_sandbox: tuple[Volume, VolumeSnapshot, Sandbox],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "forced")

    monkeypatch.setattr(store, "_extend", fail)
    volume, snapshot, _ = volume_snapshot_and_sandbox
    with pytest.raises(NoSpace, match="no space left"):
        await host.rollback(volume, snapshot)
    assert (
        read_file(get_image_path(host, volume), "a") == "two" and not host.servers.calls and not list_stray_files(host)
    )


# -- several volumes ---------------------------------------------------------------------------------------------------


async def create_two_volumes(host: VolumeHost) -> tuple[Volume, Volume]:
    volume_one, volume_two = make_volume("one"), make_volume("two")
    for volume in (volume_one, volume_two):
        await host.create(volume)
    return volume_one, volume_two


async def test_all_volumes_are_frozen_during_a_capture(host: VolumeHost) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
    captures = [
        make_snapshot(volume_one, sandbox_snapshot=snapshot.id),
        make_snapshot(volume_two, sandbox_snapshot=snapshot.id),
    ]
    await host.capture_sandbox(snapshot, captures)
    assert host.servers.largest_frozen_set == {volume_one.id, volume_two.id} and not host.servers.frozen_volumes
    _, scan = await reopen(host, snapshots=(snapshot.id,))
    assert {each.id for each in scan.volume_snapshots} == {each.id for each in captures} and not scan.repaired


@pytest.mark.parametrize("failing_operation", ["flush", "freeze", "thaw"])
async def test_if_one_volume_cannot_be_captured_all_snapshots_are_removed(
    host: VolumeHost, failing_operation: str
) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    host.servers.failing_calls = {(failing_operation, volume_two.id)}
    snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
    with pytest.raises(BackendFailed, match=f"{failing_operation} refused"):
        await host.capture_sandbox(
            snapshot,
            [
                make_snapshot(volume_one, sandbox_snapshot=snapshot.id),
                make_snapshot(volume_two, sandbox_snapshot=snapshot.id),
            ],
        )
    assert not host.servers.frozen_volumes
    assert not list(host.layout.volumes.glob("*/snapshots/*")) and not list(host.layout.volumes.glob("*/snapshots/.*"))
    assert not commit_protocol.list_directories(host.layout.snapshots)


async def test_volume_snapshots_of_an_uncommitted_snapshot_are_removed(
    host: VolumeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
    original_commit = commit_protocol.commit

    def fail(final: Path) -> None:
        if final.name == snapshot.id:
            raise OSError(5, "forced")
        original_commit(final)

    monkeypatch.setattr(commit_protocol, "commit", fail)
    with pytest.raises(OSError, match="forced"):
        await host.capture_sandbox(
            snapshot,
            [
                make_snapshot(volume_one, sandbox_snapshot=snapshot.id),
                make_snapshot(volume_two, sandbox_snapshot=snapshot.id),
            ],
        )
    assert not list(host.layout.volumes.glob("*/snapshots/*")) and not list_stray_files(host)


# -- no space ----------------------------------------------------------------------------------------------------------


async def test_creations_snapshots_and_clones_fail_on_a_full_disk(tmp_path: Path, requires_root: None) -> None:
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320) as xfs:
        host = VolumeHost(xfs.mount_point)
        volume = make_volume()
        await host.create(volume)
        write_file(get_image_path(host, volume), "a", "one")
        snapshot = make_snapshot(volume)
        await host.capture(snapshot)
        paths_before = sorted(map(str, host.layout.volumes.glob("**/*")))
        filler = fill_disk(xfs.mount_point)
        os.truncate(filler, filler.stat().st_size - (400 << 10))
        for operation in (
            lambda: host.create(make_volume("another", 4096)),  # Fails after it has written a part.
            lambda: exhaust_space(lambda: host.capture(make_snapshot(volume, f"s{next(_numbers)}"))),
            lambda: exhaust_space(lambda: host.create(make_volume(f"v{next(_numbers)}"), snapshot)),
        ):
            with pytest.raises(NoSpace, match="no space left"):
                await operation()
            assert not list_stray_files(host)
            assert read_file(get_image_path(host, volume), "a") == "one"
        _, scan = await reopen(host)
        assert volume in scan.volumes and snapshot in scan.volume_snapshots
        filler.unlink()
        assert not [sentence for sentence in scan.repaired if "damaged" in sentence]
        assert set(paths_before) <= set(map(str, host.layout.volumes.glob("**/*")))
        await host.capture(make_snapshot(volume, "later"))


async def exhaust_space(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat ``work`` until it fails. Clones are small, so several of them are needed to use up the last block."""
    for _ in range(2000):
        await work()


def fill_disk(directory: Path) -> Path:
    """Create a file that uses all free blocks."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"\1" * block):
                    pass
    return filler


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def volume_and_snapshot(host: VolumeHost) -> tuple[Volume, VolumeSnapshot]:
    """A volume that contains "two", and a snapshot of it that contains "one"."""
    volume = make_volume()
    await host.create(volume)
    write_file(get_image_path(host, volume), "a", "one")
    snapshot = make_snapshot(volume)
    await host.capture(snapshot)
    write_file(get_image_path(host, volume), "a", "two")
    return volume, snapshot


def truncate(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def get_only_volume(scan: Scan) -> Volume:
    (volume,) = scan.volumes
    return volume


async def test_a_volume_with_a_damaged_record_is_named_by_its_id(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = volume_and_snapshot
    truncate(get_image_path(host, volume).with_name("manifest.json"))
    reopened_host, scan = await reopen(host)
    recreated_volume = get_only_volume(scan)
    assert (recreated_volume.id, recreated_volume.name, recreated_volume.size_mb) == (
        volume.id,
        volume.id,
        volume.size_mb,
    )
    assert recreated_volume.host["port"] in VOLUME_PORTS and scan.volume_snapshots == [snapshot]
    assert any(f"record of volume {volume.id} is damaged" in sentence for sentence in scan.repaired)
    assert read_file(get_image_path(host, volume), "a") == "two"
    assert list((host.layout.root / ".damaged").iterdir())
    _, scan = await reopen(reopened_host)
    assert scan.volumes == [recreated_volume] and not scan.repaired


@pytest.mark.parametrize("damage", ["missing", "short"])
async def test_a_volume_that_lost_its_image_keeps_its_snapshots(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot], damage: str
) -> None:
    volume, snapshot = volume_and_snapshot
    if damage == "missing":
        get_image_path(host, volume).unlink()
    else:
        os.truncate(get_image_path(host, volume), 4096)
    running_sandbox = make_sandbox(Mount(volume=volume.id, path="/data"))
    host.addresses[running_sandbox.instance] = "10.0.0.6"
    reopened_host, scan = await reopen(host, running_sandbox)
    assert get_only_volume(scan) == volume and scan.volume_snapshots == [snapshot]
    assert any("its snapshots, which are intact" in sentence for sentence in scan.repaired)
    assert not get_image_path(host, volume).exists() and ("stop", volume.id) in reopened_host.servers.calls

    sandbox = make_sandbox(Mount(volume=volume.id, path="/data"))
    with pytest.raises(Conflict, match="roll the volume back to one of its snapshots"):
        await reopened_host.start_machine(sandbox, "10.0.0.2")
    reopened_host.stop_machine(sandbox, reopened_host.wait_for_background_tasks)
    with pytest.raises(Conflict, match="roll the volume back to one of its snapshots"):
        await reopened_host.capture(make_snapshot(volume))
    assert "roll the volume back" in (await reopened_host.state(volume)).stuck[0]
    await reopened_host.rollback(volume, snapshot)
    assert not (await reopened_host.state(volume)).stuck
    assert read_file(get_image_path(host, volume), "a") == "one"
    _, scan = await reopen(reopened_host)
    assert get_only_volume(scan) == volume and not scan.repaired


async def test_a_volume_without_an_intact_image_or_snapshot_is_quarantined(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    damaged_volume = make_volume("other")
    await host.create(damaged_volume)
    os.truncate(get_image_path(host, damaged_volume), 4096)
    _, scan = await reopen(host)
    assert get_only_volume(scan) == volume_and_snapshot[0]
    assert any(f"{damaged_volume.id} is damaged" in sentence for sentence in scan.repaired)
    assert not get_image_path(host, damaged_volume).parent.exists()


async def test_a_damaged_snapshot_is_quarantined_and_its_volume_remains(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = volume_and_snapshot
    second_snapshot = make_snapshot(volume, "second")
    await host.capture(second_snapshot)
    truncate(get_snapshot_image_path(host, snapshot).with_name("manifest.json"))
    os.truncate(get_snapshot_image_path(host, second_snapshot), 4096)
    _, scan = await reopen(host)
    assert scan.volumes == [volume] and scan.volume_snapshots == []
    assert len(list((host.layout.root / ".damaged").iterdir())) == 2


async def test_volume_snapshots_of_a_missing_snapshot_are_removed(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = volume_and_snapshot
    sandbox_snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
    await host.capture(volume_snapshot := make_snapshot(volume, "part", sandbox_snapshot=sandbox_snapshot.id))
    _, scan = await reopen(host, snapshots=(sandbox_snapshot.id,))
    assert {each.id for each in scan.volume_snapshots} == {snapshot.id, volume_snapshot.id}
    _, scan = await reopen(host)
    assert scan.volume_snapshots == [snapshot] and not get_snapshot_image_path(host, volume_snapshot).exists()


async def test_volume_snapshots_of_a_damaged_snapshot_are_quarantined(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = volume_and_snapshot
    sandbox_snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
    await host.capture(volume_snapshot := make_snapshot(volume, "part", sandbox_snapshot=sandbox_snapshot.id))
    (host.layout.snapshots / sandbox_snapshot.id).mkdir()
    quarantine_path = Quarantine(host.layout.root).move(host.layout.snapshots / sandbox_snapshot.id)
    _, scan = await reopen(host)
    assert scan.volume_snapshots == [snapshot]
    (quarantined_path,) = [path for path in quarantine_path.parent.iterdir() if volume_snapshot.id in path.name]
    assert read_file(quarantined_path / "volume.img", "a") == "two"


async def test_foreign_files_among_the_volumes_are_ignored(
    host: VolumeHost, volume_and_snapshot: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = volume_and_snapshot
    (host.layout.volumes / "foreign").mkdir()
    (host.layout.volumes / "foreign" / "file").touch()
    (host.layout.volumes / "empty").mkdir()
    (host.layout.volumes / "note.txt").touch()
    shutil.rmtree(get_snapshot_image_path(host, snapshot).parent.parent)
    _, scan = await reopen(host)
    assert scan.volumes == [volume] and len(scan.repaired) == 2


async def test_the_newer_of_two_volumes_with_the_same_port_gets_a_different_port(host: VolumeHost) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    manifest = get_image_path(host, volume_two).with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"host": volume_one.host}))
    _, scan = await reopen(host)
    volumes = {volume.id: volume for volume in scan.volumes}
    assert volumes[volume_one.id].host == volume_one.host != volumes[volume_two.id].host
    assert record_files.read_record(manifest.parent, Volume) == volumes[volume_two.id]


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_released_port_is_reused_after_all_other_ports() -> None:
    ports = Ports(())
    first_port = ports.take()
    ports.release(first_port)
    other_ports = [ports.take() for _ in range(len(VOLUME_PORTS) - 1)]
    assert first_port not in other_ports and len(set(other_ports)) == len(other_ports)
    assert ports.take() == first_port
    with pytest.raises(Busy, match=f"the limit of {len(VOLUME_PORTS)} volumes"):
        ports.take()


async def test_a_failed_creation_releases_its_port(host: VolumeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: Any) -> None:
        raise BackendFailed("forced")

    monkeypatch.setattr(ports, "VOLUME_PORTS", VOLUME_PORTS[:2])
    await host.scan()
    with monkeypatch.context() as patch:
        patch.setattr(store, "format_image", fail)
        for _ in range(3):
            with pytest.raises(BackendFailed, match="forced"):
                await host.create(make_volume())
    assert not list_stray_files(host)
    volume_one, volume_two = await create_two_volumes(host)
    assert {volume_one.host["port"], volume_two.host["port"]} == set(VOLUME_PORTS[:2])


# -- access by sandboxes -----------------------------------------------------------------------------------------------


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm_volumes, "_RETRY_DELAYS_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(kvm_volumes, "_DETACH_TIMEOUT_SECONDS", 0.2)


async def test_a_server_accepts_clients_while_their_sandboxes_run_and_stops_with_the_last(host: VolumeHost) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    writer = make_sandbox(
        Mount(volume=volume_one.id, path="/one"), Mount(volume=volume_two.id, path="/two", read_only=True)
    )
    reader = make_sandbox(Mount(volume=volume_one.id, path="/one", read_only=True))
    client_counts = []

    async def release() -> None:
        client_counts.append(len(host.servers.clients))

    await asyncio.gather(host.start_machine(writer, "10.0.0.2"), host.start_machine(reader, "10.0.0.6"))
    assert host.servers.clients == {
        volume_one.id: {"10.0.0.2": False, "10.0.0.6": True},
        volume_two.id: {"10.0.0.2": True},
    }
    assert [mount.path for mount in host.list_guest_mounts(writer)] == ["/one", "/two"]
    assert host.stop_machine(writer, release)
    await host.wait_for_background_tasks()
    assert host.servers.clients == {volume_one.id: {"10.0.0.6": True}}
    assert host.stop_machine(reader, release)
    await host.wait_for_background_tasks()
    assert host.servers.clients == {} and client_counts == [1, 0]


async def test_stopping_a_sandbox_releases_its_address_only_after_servers_revoke_access(
    host: VolumeHost, short_timeouts: None
) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    sandbox = make_sandbox(Mount(volume=volume_one.id, path="/one"), Mount(volume=volume_two.id, path="/two"))
    releases = []

    async def release() -> None:
        releases.append(True)

    await host.start_machine(sandbox, "10.0.0.2")
    host.servers.failing_calls = {("stop", volume_two.id)}
    assert host.stop_machine(sandbox, release)
    await _wait_until(lambda: host.servers.calls.count(("stop", volume_two.id)) > 3)
    assert volume_one.id not in host.servers.clients
    state = await host.state(volume_two)
    assert state.used_bytes == get_size_on_disk(get_image_path(host, volume_two))
    (sentence,) = state.stuck
    assert "stop refused" in sentence and volume_two.id in sentence
    assert not (await host.state(volume_one)).stuck and not releases
    host.servers.failing_calls.clear()
    await host.wait_for_background_tasks()
    assert releases and not (await host.state(volume_two)).stuck


async def test_a_machine_without_volumes_does_not_call_servers(host: VolumeHost) -> None:
    sandbox = make_sandbox()
    await host.start_machine(sandbox, "10.0.0.2")
    assert not host.stop_machine(sandbox, host.wait_for_background_tasks) and not host.servers.calls


async def test_a_volume_is_attached_and_detached_while_the_machine_runs(host: VolumeHost, short_timeouts: None) -> None:
    volume_one, _ = await create_two_volumes(host)
    sandbox = make_sandbox()
    mount = Mount(volume=volume_one.id, path="/one")

    await host.start_machine(sandbox, "10.0.0.2")
    await host.attach(sandbox, mount, host.addresses[sandbox.instance])
    assert host.servers.clients == {volume_one.id: {"10.0.0.2": False}}
    host.servers.failing_calls = {("stop", volume_one.id)}
    await host.detach(sandbox, mount)
    assert (await host.state(volume_one)).stuck
    host.servers.failing_calls.clear()
    await host.wait_for_background_tasks()
    assert host.servers.clients == {}


async def test_a_failed_attach_changes_nothing(host: VolumeHost, short_timeouts: None) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    sandbox = make_sandbox(Mount(volume=volume_one.id, path="/one", read_only=True))

    await host.start_machine(sandbox, "10.0.0.2")
    host.servers.failing_calls = {("serve", volume_one.id), ("serve", volume_two.id)}
    for mount in (Mount(volume=volume_two.id, path="/two"), Mount(volume=volume_one.id, path="/one")):
        with pytest.raises(BackendFailed, match="serve refused"):
            await host.attach(sandbox, mount, host.addresses[sandbox.instance])
    with pytest.raises(NotFound):
        await host.attach(sandbox, Mount(volume="0" * 12, path="/none"), "10.0.0.2")
    host.servers.failing_calls.clear()
    await host.wait_for_background_tasks()
    assert host.servers.clients == {volume_one.id: {"10.0.0.2": True}}


async def test_a_new_gateway_grants_access_to_exactly_the_running_sandboxes(
    host: VolumeHost, short_timeouts: None
) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    running_sandbox = make_sandbox(
        Mount(volume=volume_one.id, path="/one", read_only=True), Mount(volume="0" * 12, path="/gone")
    )
    paused_sandbox = make_sandbox(Mount(volume=volume_two.id, path="/two"))
    host.addresses[running_sandbox.instance] = "10.0.0.2"
    reopened_host, scan = await reopen(host, running_sandbox, paused_sandbox)
    assert reopened_host.servers.known_volumes == {volume_one.id, volume_two.id}
    assert (
        reopened_host.servers.clients == {volume_one.id: {"10.0.0.2": True}}
        and ("stop", volume_two.id) in reopened_host.servers.calls
    )
    assert not scan.repaired
    assert [mount.path for mount in reopened_host.list_guest_mounts(running_sandbox)] == ["/one"]


async def test_state_reports_an_unresponsive_server(host: VolumeHost) -> None:
    volume_one, _ = await create_two_volumes(host)
    host.servers.failing_calls = {("count_used_bytes", volume_one.id)}
    assert "count_used_bytes refused" in (await host.state(volume_one)).stuck[0]


async def test_a_server_that_cannot_be_started_does_not_block_the_gateway(
    host: VolumeHost, short_timeouts: None
) -> None:
    volume_one, volume_two = await create_two_volumes(host)
    sandbox = make_sandbox(Mount(volume=volume_one.id, path="/one"), Mount(volume=volume_two.id, path="/two"))
    reopened_host = VolumeHost(host.layout.root)
    reopened_host.addresses = {sandbox.instance: "10.0.0.2"}

    reopened_host.servers.failing_calls = {("serve", volume_one.id)}
    scan = await reopened_host.scan(sandbox)
    assert any(f"volume {volume_one.id} cannot be served" in sentence for sentence in scan.repaired)
    assert reopened_host.servers.clients == {volume_two.id: {"10.0.0.2": False}}
    reopened_host.servers.failing_calls.clear()
    await reopened_host.wait_for_background_tasks()
    assert reopened_host.servers.clients == {volume_one.id: {"10.0.0.2": False}, volume_two.id: {"10.0.0.2": False}}


# -- crash at any step -------------------------------------------------------------------------------------------------


def run_until_killed(host: VolumeHost, work: Coroutine[Any, Any, None], fatal_step: int) -> int:
    """Run ``work`` in a child process that dies at step ``fatal_step``.

    Return KILLED_EXIT_CODE, or the total number of steps if ``work`` finishes before that step.
    """
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        step_counter = StepCounter(fatal_step)
        try:
            sys.addaudithook(step_counter.on_audit)
            asyncio.run(_run_and_count_steps(work, step_counter))
            os.write(writer, str(step_counter.count).encode())
        finally:
            os._exit(0)
    work.close()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert exit_code == KILLED_EXIT_CODE or (exit_code == 0 and output), "the operation failed"
    return int(output) if exit_code == 0 else KILLED_EXIT_CODE


async def _run_and_count_steps(work: Coroutine[Any, Any, None], step_counter: StepCounter) -> None:
    step_counter.is_armed = True
    await work
    step_counter.is_armed = False


OPERATIONS: dict[str, Callable[[VolumeHost, Volume, VolumeSnapshot], Coroutine[Any, Any, None]]] = {
    "create": lambda host, volume, snapshot: host.create(make_volume("new")),
    "clone": lambda host, volume, snapshot: host.create(make_volume("new", 2 * SIZE_MB), snapshot),
    "grow": lambda host, volume, snapshot: host.grow(volume, volume.size_mb + 1),
    "capture": lambda host, volume, snapshot: host.capture(make_snapshot(volume, "new")),
    "rollback": lambda host, volume, snapshot: host.rollback(volume, snapshot),
    "remove": lambda host, volume, snapshot: host.remove(volume),
    "remove-snapshot": lambda host, volume, snapshot: host.remove_snapshot(snapshot),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_killed_at_any_step_leaves_no_partial_object(operation: str, root: Path) -> None:
    for fatal_step in itertools.count(1):
        directory = root / str(fatal_step)
        directory.mkdir()
        host = VolumeHost(directory)
        volume, snapshot = make_volume(), None
        asyncio.run(host.create(volume))
        write_file(get_image_path(host, volume), "a", "one")
        snapshot = make_snapshot(volume)
        asyncio.run(host.capture(snapshot))
        write_file(get_image_path(host, volume), "a", "two")
        outcome = run_until_killed(host, OPERATIONS[operation](host, volume, snapshot), fatal_step)
        reopened_host, scan = asyncio.run(reopen(host))
        check_volumes(reopened_host, scan, operation, volume, snapshot, f"killed at step {fatal_step}")
        if outcome != KILLED_EXIT_CODE:
            assert fatal_step > 2, "the operation has no steps at which it can be killed"
            return


def check_volumes(
    host: VolumeHost, scan: Scan, operation: str, volume: Volume, snapshot: VolumeSnapshot, moment: str
) -> None:
    assert not list_stray_files(host), moment
    assert not (host.layout.root / ".damaged").exists(), (moment, scan.repaired)
    volumes = {each.name: each for each in scan.volumes}
    snapshots = {each.name: each for each in scan.volume_snapshots}
    for each in scan.volumes:
        assert has_intact_file_system(get_image_path(host, each)), moment
        assert get_image_path(host, each).stat().st_size == each.size_mb << 20, moment
    for each in scan.volume_snapshots:
        assert has_intact_file_system(get_snapshot_image_path(host, each)), moment
    if operation == "remove":
        assert (volumes, snapshots) in (({}, {}), ({"data": volume}, {"first": snapshot})), moment
        return
    text = read_file(get_image_path(host, volume), "a")
    assert text in ("one", "two") if operation == "rollback" else text == "two", moment
    assert volumes["data"].size_mb in ((SIZE_MB, SIZE_MB + 1) if operation == "grow" else (SIZE_MB,)), moment
    if operation != "remove-snapshot":
        assert read_file(get_snapshot_image_path(host, snapshots["first"]), "a") == "one", moment
    if "new" in volumes:
        assert read_file(get_image_path(host, volumes["new"]), "a") == ("one" if operation == "clone" else ""), moment
    if "new" in snapshots:
        assert read_file(get_snapshot_image_path(host, snapshots["new"]), "a") == "two", moment


def test_a_killed_capture_of_several_volumes_is_all_or_nothing(root: Path) -> None:
    committed_count = 0
    for fatal_step in itertools.count(1):
        (root / str(fatal_step)).mkdir()
        host = VolumeHost(root / str(fatal_step))
        volume_one, volume_two = asyncio.run(create_two_volumes(host))
        snapshot = Snapshot(kind=SnapshotKind.SNAPSHOT)
        captures = [
            make_snapshot(volume_one, sandbox_snapshot=snapshot.id),
            make_snapshot(volume_two, sandbox_snapshot=snapshot.id),
        ]
        outcome = run_until_killed(host, host.capture_sandbox(snapshot, captures), fatal_step)
        committed_ids = tuple(path.name for path in commit_protocol.list_directories(host.layout.snapshots))
        _, scan = asyncio.run(reopen(host, snapshots=committed_ids))
        ids = {each.id for each in scan.volume_snapshots}
        assert ids == ({each.id for each in captures} if committed_ids else set()), f"killed at step {fatal_step}"
        assert not list_stray_files(host)
        committed_count += bool(committed_ids)
        if outcome != KILLED_EXIT_CODE:
            break
    assert fatal_step > 8 and 0 < committed_count < fatal_step


async def test_rollback_to_a_missing_snapshot_raises_a_gateway_error(host: VolumeHost) -> None:
    volume = make_volume()
    await host.create(volume)
    with pytest.raises(GatewayError):
        await host.rollback(volume, make_snapshot(volume))
    assert has_intact_file_system(get_image_path(host, volume)) and not list_stray_files(host)
