"""Volumes on an XFS: their files after each verb, after each failure, and after a crash at any step.

The servers here are doubles, which record calls and fail on request; test_volumes_live.py has real ones.
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
from sandbox_gateway.hosts import directory_records
from sandbox_gateway.hosts.base import GuestMount, Scan
from sandbox_gateway.hosts.directory_records import Quarantine
from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS
from sandbox_gateway.hosts.kvm_xfs.volumes import kvm_volumes, ports, store
from sandbox_gateway.hosts.kvm_xfs.volumes.kvm_volumes import KvmVolumes
from sandbox_gateway.hosts.kvm_xfs.volumes.ports import Ports
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import Mount, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot
from tests.support.crash import KILLED, Steps
from tests.support.xfs import LoopXfs

SMALL = 64
_numbers = itertools.count(1)


def size(image: Path) -> int:
    """Its size on the disk, in bytes."""
    return image.stat().st_blocks * 512


class Doorkeeper(ServerPool):
    """Records the calls to servers; ``refuse`` holds the calls that fail, by verb and volume."""

    def __init__(self) -> None:
        self.clients: dict[str, dict[str, bool]] = {}
        self.still: set[str] = set()
        self.most_still: set[str] = set()
        self.told: list[tuple[str, str]] = []
        self.refuse: set[tuple[str, str]] = set()
        self.known: set[str] = set()

    def _tell(self, verb: str, volume: str) -> None:
        self.told.append((verb, volume))
        if (verb, volume) in self.refuse:
            raise BackendFailed(f"{verb} refused")

    async def open(self, known: set[str]) -> list[str]:
        self.known = known
        return []

    async def close(self) -> None:
        pass

    async def serve(self, volume: str, image: Path, port: int, clients: Mapping[str, bool]) -> None:
        self._tell("serve", volume)
        assert size(image) and port in VOLUME_PORTS
        self.clients[volume] = dict(clients)

    async def stop(self, volume: str) -> None:
        self._tell("stop", volume)
        self.clients.pop(volume, None)

    @contextlib.asynccontextmanager
    async def frozen(self, volume: str) -> AsyncIterator[None]:
        self._tell("freeze", volume)
        self.still.add(volume)
        self.most_still = max(self.most_still, set(self.still), key=len)
        try:
            yield
        finally:
            self.still.discard(volume)
            self._tell("thaw", volume)

    async def flush(self, volume: str) -> None:
        self._tell("flush", volume)

    async def grow(self, volume: str) -> None:
        self._tell("grow", volume)

    async def used_bytes(self, volume: str, image: Path) -> int:
        self._tell("ask", volume)
        return size(image)

    def mounts(self, volume: str, port: int, path: str, read_only: bool) -> GuestMount:
        return GuestMount(path, f"{port}:{volume}", "nfs", "", read_only)


class Verbs(KvmVolumes):
    """The volume part of a host, whose machines consist of names and addresses."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root)
        self.layout.create()
        self.doors = Doorkeeper()
        self.addresses: dict[str, str] = {}
        super().__init__(self.layout, Quarantine(root), self.doors)

    async def scan(self, *sandboxes: Sandbox, snapshots: tuple[str, ...] = ()) -> Scan:
        scan = Scan(sandboxes=list(sandboxes), snapshots=[Snapshot(id=each) for each in snapshots])
        await self.find(scan)
        await self.adopt(scan, self.addresses)
        return scan

    async def run(self, sandbox: Sandbox, address: str) -> None:
        self.addresses[sandbox.instance] = address
        await self.allow(sandbox, sandbox.mounts, address)

    def end(self, sandbox: Sandbox, then: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        del self.addresses[sandbox.instance]
        return self.revoke_all(sandbox.instance, then)

    async def capture_sandbox(self, snapshot: Snapshot, captures: list[VolumeSnapshot]) -> None:
        """A host's steps around the pause, and then the commit of the sandbox's snapshot."""
        async with self.pending_snapshots(captures) as pending:
            await pending.clone_images()
            await pending.commit()
            final = self.layout.snapshot(snapshot)
            directory_records.partial_of(final).mkdir()
            directory_records.write_record(directory_records.partial_of(final), snapshot)
            directory_records.commit(final)

    async def quiet(self) -> None:
        """Wait until all background work has ended."""
        await self._background.wait()


@pytest.fixture
def root(xfs_root: Path) -> Iterator[Path]:
    path = xfs_root / f"volumes-{next(_numbers)}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def host(root: Path) -> Verbs:
    return Verbs(root)


async def reopened(host: Verbs, *sandboxes: Sandbox, snapshots: tuple[str, ...] = ()) -> tuple[Verbs, Scan]:
    """The host of a gateway that starts afterwards."""
    again = Verbs(host.layout.root)
    again.addresses = host.addresses
    return again, await again.scan(*sandboxes, snapshots=snapshots)


def a_volume(name: str = "data", size_mb: int = SMALL) -> Volume:
    return Volume(name=name, size_mb=size_mb)


def a_snapshot(volume: Volume, name: str = "first", *, of: str = "") -> VolumeSnapshot:
    return VolumeSnapshot(name=name, volume=volume.id, size_mb=volume.size_mb, sandbox_snapshot=of)


def a_sandbox(*mounts: Mount) -> Sandbox:
    return Sandbox(name=f"box{next(_numbers)}", mounts=list(mounts), host={})


def image(host: Verbs, volume: Volume) -> Path:
    return host.layout.volumes / volume.id / "volume.img"


def snapshot_image(host: Verbs, snapshot: VolumeSnapshot) -> Path:
    return host.layout.volumes / snapshot.volume / "snapshots" / snapshot.id / "volume.img"


def put(image: Path, name: str, text: str) -> None:
    """Write a file into an image that no server uses."""
    note = image.with_name(f"note-{os.getpid()}")
    note.write_text(text)
    commands = f"rm {name}\nwrite {note} {name}\n"
    subprocess.run(["debugfs", "-w", "-f", "-", str(image)], input=commands, text=True, capture_output=True, timeout=20)
    note.unlink()
    assert read(image, name) == text


def read(image: Path, name: str) -> str:
    """The text of a file; empty if it does not exist."""
    argv = ["debugfs", "-R", f"cat /{name}", str(image)]
    return subprocess.run(argv, text=True, capture_output=True, timeout=20).stdout


def mode_of_root(image: Path) -> str:
    listing = subprocess.run(
        ["debugfs", "-R", "ls -p /", str(image)], text=True, capture_output=True, timeout=20
    ).stdout
    names = {line.split("/")[5]: line.split("/")[2] for line in listing.splitlines() if line.startswith("/")}
    return names["."]


def sound(image: Path) -> bool:
    return subprocess.run(["e2fsck", "-fn", str(image)], capture_output=True, timeout=60).returncode == 0


def strays(host: Verbs) -> list[str]:
    return sorted(str(path.relative_to(host.layout.root)) for path in host.layout.volumes.glob("**/.partial*"))


async def _eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# -- files of volumes --------------------------------------------------------------------------------------------------


async def test_a_new_volume_is_empty_open_to_all_and_costs_little(host: Verbs) -> None:
    volume = a_volume(size_mb=1024)
    await host.create(volume)
    made = image(host, volume)
    assert made.stat().st_size == 1024 << 20 and size(made) < 64 << 20
    assert made.stat().st_mode & 0o777 == 0o600
    assert sound(made)
    assert mode_of_root(made) == "040777"
    assert volume.host["port"] in VOLUME_PORTS
    _, scan = await reopened(host)
    assert scan.volumes == [volume] and not scan.repaired and not strays(host)


async def test_a_snapshot_is_what_the_volume_was(host: Verbs) -> None:
    volume = a_volume()
    await host.create(volume)
    put(image(host, volume), "a", "one")
    snapshot = a_snapshot(volume)
    await host.capture(snapshot)
    assert reflink.unique_bytes(snapshot_image(host, snapshot)) == 0
    put(image(host, volume), "a", "two")
    assert read(snapshot_image(host, snapshot), "a") == "one"
    assert [verb for verb, _ in host.doors.told] == ["flush", "freeze", "thaw"]
    _, scan = await reopened(host)
    assert scan.volume_snapshots == [snapshot] and not scan.repaired
    await host.remove_snapshot(snapshot)
    assert not snapshot_image(host, snapshot).parent.exists() and not strays(host)


async def test_a_clone_has_the_content_and_may_be_larger(host: Verbs) -> None:
    volume, clone = a_volume(), a_volume("clone", 2 * SMALL)
    await host.create(volume)
    put(image(host, volume), "a", "one")
    snapshot = a_snapshot(volume)
    await host.capture(snapshot)
    await host.create(clone, snapshot)
    assert image(host, clone).stat().st_size == 2 * SMALL << 20
    assert read(image(host, clone), "a") == "one"
    assert clone.host["port"] != volume.host["port"]
    await host.remove(volume)
    assert read(image(host, clone), "a") == "one"


async def test_a_removed_volume_takes_its_snapshots_along(host: Verbs) -> None:
    volume = a_volume()
    await host.create(volume)
    await host.capture(a_snapshot(volume))
    await host.remove(volume)
    assert not list(host.layout.volumes.iterdir())
    await host.quiet()
    assert host.doors.told[-1] == ("stop", volume.id)
    with pytest.raises(NotFound):
        await host.state(volume)


async def test_growth_is_told_to_the_server_and_kept(host: Verbs) -> None:
    volume = a_volume()
    await host.create(volume)
    await host.grow(volume, 3 * SMALL)
    assert volume.size_mb == 3 * SMALL and image(host, volume).stat().st_size == 3 * SMALL << 20
    assert host.doors.told == [("grow", volume.id)]
    _, scan = await reopened(host)
    assert scan.volumes == [volume] and not scan.repaired


async def test_growth_that_the_server_refuses_is_not_recorded_and_can_be_had_later(host: Verbs) -> None:
    volume = a_volume()
    await host.create(volume)
    host.doors.refuse = {("grow", volume.id)}
    with pytest.raises(BackendFailed):
        await host.grow(volume, 2 * SMALL)
    assert volume.size_mb == SMALL
    host.doors.refuse.clear()
    await host.grow(volume, 2 * SMALL)
    assert volume.size_mb == 2 * SMALL and image(host, volume).stat().st_size == 2 * SMALL << 20


# -- rollback ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def rolled(host: Verbs) -> tuple[Volume, VolumeSnapshot, Sandbox]:
    """A volume that holds "two", a snapshot of it with "one", and a sandbox that mounts it."""
    volume = a_volume()
    await host.create(volume)
    put(image(host, volume), "a", "one")
    snapshot = a_snapshot(volume)
    await host.capture(snapshot)
    put(image(host, volume), "a", "two")
    sandbox = a_sandbox(Mount(volume=volume.id, path="/data"))
    await host.run(sandbox, "10.0.0.2")
    host.doors.told.clear()
    return volume, snapshot, sandbox


async def test_rollback_brings_back_the_files_and_the_clients(
    host: Verbs, rolled: tuple[Volume, VolumeSnapshot, Sandbox]
) -> None:
    volume, snapshot, _ = rolled
    await host.rollback(volume, snapshot)
    assert read(image(host, volume), "a") == "one"
    assert host.doors.told == [("stop", volume.id), ("serve", volume.id)]
    assert host.doors.clients == {volume.id: {"10.0.0.2": False}}
    put(image(host, volume), "a", "three")
    assert read(snapshot_image(host, snapshot), "a") == "one"
    assert not strays(host)


async def test_a_volume_that_has_grown_keeps_its_size_when_rolled_back(
    host: Verbs, rolled: tuple[Volume, VolumeSnapshot, Sandbox]
) -> None:
    volume, snapshot, _ = rolled
    await host.grow(volume, 2 * SMALL)
    await host.rollback(volume, snapshot)
    assert read(image(host, volume), "a") == "one"
    assert (volume.size_mb, image(host, volume).stat().st_size) == (2 * SMALL, 2 * SMALL << 20)
    _, scan = await reopened(host)
    assert scan.volumes == [volume] and not scan.repaired


@pytest.mark.parametrize("refused", ["stop", "serve"])
async def test_rollback_that_fails_leaves_the_old_one_and_its_clients(
    host: Verbs, rolled: tuple[Volume, VolumeSnapshot, Sandbox], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvm_volumes, "_RETRY_SECONDS", (0.01,))
    volume, snapshot, _ = rolled

    host.doors.refuse = {(refused, volume.id)}
    with pytest.raises(BackendFailed, match=f"{refused} refused"):
        await host.rollback(volume, snapshot)
    assert read(image(host, volume), "a") == "two"
    host.doors.refuse.clear()
    await host.quiet()
    assert host.doors.clients == {volume.id: {"10.0.0.2": False}}
    assert not strays(host)


async def test_rollback_for_which_there_is_no_space_is_not_noticed(
    host: Verbs, rolled: tuple[Volume, VolumeSnapshot, Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "forced")

    monkeypatch.setattr(store, "_extend", refuse)
    volume, snapshot, _ = rolled
    with pytest.raises(NoSpace, match="no space left"):
        await host.rollback(volume, snapshot)
    assert read(image(host, volume), "a") == "two" and not host.doors.told and not strays(host)


# -- several at once ---------------------------------------------------------------------------------------------------


async def two_volumes(host: Verbs) -> tuple[Volume, Volume]:
    one, two = a_volume("one"), a_volume("two")
    for volume in (one, two):
        await host.create(volume)
    return one, two


async def test_volumes_are_captured_while_all_stand_still(host: Verbs) -> None:
    one, two = await two_volumes(host)
    taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
    captures = [a_snapshot(one, of=taken.id), a_snapshot(two, of=taken.id)]
    await host.capture_sandbox(taken, captures)
    assert host.doors.most_still == {one.id, two.id} and not host.doors.still
    _, scan = await reopened(host, snapshots=(taken.id,))
    assert {each.id for each in scan.volume_snapshots} == {each.id for each in captures} and not scan.repaired


@pytest.mark.parametrize("refused", ["flush", "freeze", "thaw"])
async def test_where_one_cannot_be_captured_none_is(host: Verbs, refused: str) -> None:
    one, two = await two_volumes(host)
    host.doors.refuse = {(refused, two.id)}
    taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
    with pytest.raises(BackendFailed, match=f"{refused} refused"):
        await host.capture_sandbox(taken, [a_snapshot(one, of=taken.id), a_snapshot(two, of=taken.id)])
    assert not host.doors.still
    assert not list(host.layout.volumes.glob("*/snapshots/*")) and not list(host.layout.volumes.glob("*/snapshots/.*"))
    assert not directory_records.directories(host.layout.snapshots)


async def test_where_the_snapshot_is_not_committed_its_volumes_are_not_either(
    host: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await two_volumes(host)
    taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
    commit = directory_records.commit

    def refuse(final: Path) -> None:
        if final.name == taken.id:
            raise OSError(5, "forced")
        commit(final)

    monkeypatch.setattr(directory_records, "commit", refuse)
    with pytest.raises(OSError, match="forced"):
        await host.capture_sandbox(taken, [a_snapshot(one, of=taken.id), a_snapshot(two, of=taken.id)])
    assert not list(host.layout.volumes.glob("*/snapshots/*")) and not strays(host)


# -- no space ----------------------------------------------------------------------------------------------------------


async def test_no_space_for_a_snapshot_a_clone_or_a_rollback(tmp_path: Path, need_root: None) -> None:
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320) as xfs:
        host = Verbs(xfs.mount_point)
        volume = a_volume()
        await host.create(volume)
        put(image(host, volume), "a", "one")
        snapshot = a_snapshot(volume)
        await host.capture(snapshot)
        before = sorted(map(str, host.layout.volumes.glob("**/*")))
        filler = fill(xfs.mount_point)
        os.truncate(filler, filler.stat().st_size - (400 << 10))
        for work in (
            lambda: host.create(a_volume("another", 4096)),  # It starts, and fails in the middle.
            lambda: exhausting(lambda: host.capture(a_snapshot(volume, f"s{next(_numbers)}"))),
            lambda: exhausting(lambda: host.create(a_volume(f"v{next(_numbers)}"), snapshot)),
        ):
            with pytest.raises(NoSpace, match="no space left"):
                await work()
            assert not strays(host)
            assert read(image(host, volume), "a") == "one"
        _, scan = await reopened(host)
        assert volume in scan.volumes and snapshot in scan.volume_snapshots
        filler.unlink()
        assert not [sentence for sentence in scan.repaired if "damaged" in sentence]
        assert set(before) <= set(map(str, host.layout.volumes.glob("**/*")))
        await host.capture(a_snapshot(volume, "later"))


async def exhausting(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Clones cost little: it takes several of them to use the last block."""
    for _ in range(2000):
        await work()


def fill(directory: Path) -> Path:
    """Take all free blocks."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(b"\1" * block):
                    pass
    return filler


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def kept(host: Verbs) -> tuple[Volume, VolumeSnapshot]:
    """A volume with "two" and a snapshot of it with "one"."""
    volume = a_volume()
    await host.create(volume)
    put(image(host, volume), "a", "one")
    snapshot = a_snapshot(volume)
    await host.capture(snapshot)
    put(image(host, volume), "a", "two")
    return volume, snapshot


def tear(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def only(scan: Scan) -> Volume:
    (volume,) = scan.volumes
    return volume


async def test_a_volume_whose_record_is_torn_goes_by_its_id(host: Verbs, kept: tuple[Volume, VolumeSnapshot]) -> None:
    volume, snapshot = kept
    tear(image(host, volume).with_name("manifest.json"))
    again, scan = await reopened(host)
    found = only(scan)
    assert (found.id, found.name, found.size_mb) == (volume.id, volume.id, volume.size_mb)
    assert found.host["port"] in VOLUME_PORTS and scan.volume_snapshots == [snapshot]
    assert any(f"record of volume {volume.id} is damaged" in sentence for sentence in scan.repaired)
    assert read(image(host, volume), "a") == "two"
    assert list((host.layout.root / ".damaged").iterdir())
    _, scan = await reopened(again)
    assert scan.volumes == [found] and not scan.repaired


@pytest.mark.parametrize("damage", ["gone", "short"])
async def test_a_volume_that_lost_its_image_keeps_its_snapshots(
    host: Verbs, kept: tuple[Volume, VolumeSnapshot], damage: str
) -> None:
    volume, snapshot = kept
    if damage == "gone":
        image(host, volume).unlink()
    else:
        os.truncate(image(host, volume), 4096)
    runs = a_sandbox(Mount(volume=volume.id, path="/data"))
    host.addresses[runs.instance] = "10.0.0.6"
    again, scan = await reopened(host, runs)
    assert only(scan) == volume and scan.volume_snapshots == [snapshot]
    assert any("its snapshots stay" in sentence for sentence in scan.repaired)
    assert not image(host, volume).exists() and ("stop", volume.id) in again.doors.told

    sandbox = a_sandbox(Mount(volume=volume.id, path="/data"))
    with pytest.raises(Conflict, match="roll it back"):
        await again.run(sandbox, "10.0.0.2")
    again.end(sandbox, again.quiet)
    with pytest.raises(Conflict, match="roll it back"):
        await again.capture(a_snapshot(volume))
    assert "roll it back" in (await again.state(volume)).stuck[0]
    await again.rollback(volume, snapshot)
    assert not (await again.state(volume)).stuck
    assert read(image(host, volume), "a") == "one"
    _, scan = await reopened(again)
    assert only(scan) == volume and not scan.repaired


async def test_a_volume_of_which_nothing_is_left_is_put_aside(host: Verbs, kept: tuple[Volume, VolumeSnapshot]) -> None:
    other = a_volume("other")
    await host.create(other)
    os.truncate(image(host, other), 4096)
    _, scan = await reopened(host)
    assert only(scan) == kept[0]
    assert any(f"{other.id} is damaged" in sentence for sentence in scan.repaired)
    assert not image(host, other).parent.exists()


async def test_a_damaged_snapshot_is_put_aside_and_its_volume_stays(
    host: Verbs, kept: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = kept
    second = a_snapshot(volume, "second")
    await host.capture(second)
    tear(snapshot_image(host, snapshot).with_name("manifest.json"))
    os.truncate(snapshot_image(host, second), 4096)
    _, scan = await reopened(host)
    assert scan.volumes == [volume] and scan.volume_snapshots == []
    assert len(list((host.layout.root / ".damaged").iterdir())) == 2


async def test_what_was_captured_with_a_snapshot_that_is_not_there_is_swept(
    host: Verbs, kept: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = kept
    taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
    await host.capture(part := a_snapshot(volume, "part", of=taken.id))
    _, scan = await reopened(host, snapshots=(taken.id,))
    assert {each.id for each in scan.volume_snapshots} == {snapshot.id, part.id}
    _, scan = await reopened(host)
    assert scan.volume_snapshots == [snapshot] and not snapshot_image(host, part).exists()


async def test_what_was_captured_with_a_snapshot_that_was_put_aside_is_put_aside_too(
    host: Verbs, kept: tuple[Volume, VolumeSnapshot]
) -> None:
    volume, snapshot = kept
    taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
    await host.capture(part := a_snapshot(volume, "part", of=taken.id))
    (host.layout.snapshots / taken.id).mkdir()
    moved = Quarantine(host.layout.root).move(host.layout.snapshots / taken.id)
    _, scan = await reopened(host)
    assert scan.volume_snapshots == [snapshot]
    (aside,) = [path for path in moved.parent.iterdir() if part.id in path.name]
    assert read(aside / "volume.img", "a") == "two"


async def test_strangers_among_the_volumes_stop_nobody(host: Verbs, kept: tuple[Volume, VolumeSnapshot]) -> None:
    volume, snapshot = kept
    (host.layout.volumes / "stranger").mkdir()
    (host.layout.volumes / "stranger" / "file").touch()
    (host.layout.volumes / "empty").mkdir()
    (host.layout.volumes / "note.txt").touch()
    shutil.rmtree(snapshot_image(host, snapshot).parent.parent)
    _, scan = await reopened(host)
    assert scan.volumes == [volume] and len(scan.repaired) == 2


async def test_of_two_volumes_with_one_port_the_younger_gets_another(host: Verbs) -> None:
    one, two = await two_volumes(host)
    manifest = image(host, two).with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"host": one.host}))
    _, scan = await reopened(host)
    found = {volume.id: volume for volume in scan.volumes}
    assert found[one.id].host == one.host != found[two.id].host
    assert directory_records.read_record(manifest.parent, Volume) == found[two.id]


# -- ports -------------------------------------------------------------------------------------------------------------


def test_ports_come_round_only_when_all_others_are_taken() -> None:
    ports = Ports(())
    first = ports.take()
    ports.release(first)
    others = [ports.take() for _ in range(len(VOLUME_PORTS) - 1)]
    assert first not in others and len(set(others)) == len(others)
    assert ports.take() == first
    with pytest.raises(Busy, match=f"at most {len(VOLUME_PORTS)} volumes"):
        ports.take()


async def test_a_volume_that_could_not_be_made_gives_its_port_back(
    host: Verbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any) -> None:
        raise BackendFailed("forced")

    monkeypatch.setattr(ports, "VOLUME_PORTS", VOLUME_PORTS[:2])
    await host.scan()
    with monkeypatch.context() as broken:
        broken.setattr(store, "format_image", refuse)
        for _ in range(3):
            with pytest.raises(BackendFailed, match="forced"):
                await host.create(a_volume())
    assert not strays(host)
    one, two = await two_volumes(host)
    assert {one.host["port"], two.host["port"]} == set(VOLUME_PORTS[:2])


# -- access by sandboxes -----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvm_volumes, "_RETRY_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(kvm_volumes, "_DETACH_SECONDS", 0.2)


async def test_a_server_lets_in_who_runs_and_ends_with_the_last(host: Verbs) -> None:
    one, two = await two_volumes(host)
    writer = a_sandbox(Mount(volume=one.id, path="/one"), Mount(volume=two.id, path="/two", read_only=True))
    reader = a_sandbox(Mount(volume=one.id, path="/one", read_only=True))
    released = []

    async def release() -> None:
        released.append(len(host.doors.clients))

    await asyncio.gather(host.run(writer, "10.0.0.2"), host.run(reader, "10.0.0.6"))
    assert host.doors.clients == {one.id: {"10.0.0.2": False, "10.0.0.6": True}, two.id: {"10.0.0.2": True}}
    assert [mount.path for mount in host.guest_mounts(writer)] == ["/one", "/two"]
    assert host.end(writer, release)
    await host.quiet()
    assert host.doors.clients == {one.id: {"10.0.0.6": True}}
    assert host.end(reader, release)
    await host.quiet()
    assert host.doors.clients == {} and released == [1, 0]


async def test_an_end_waits_for_no_server_and_its_address_for_all_of_them(host: Verbs, impatient: None) -> None:
    one, two = await two_volumes(host)
    sandbox = a_sandbox(Mount(volume=one.id, path="/one"), Mount(volume=two.id, path="/two"))
    released = []

    async def release() -> None:
        released.append(True)

    await host.run(sandbox, "10.0.0.2")
    host.doors.refuse = {("stop", two.id)}
    assert host.end(sandbox, release)
    await _eventually(lambda: host.doors.told.count(("stop", two.id)) > 3)
    assert one.id not in host.doors.clients
    state = await host.state(two)
    assert state.used_bytes == size(image(host, two))
    (sentence,) = state.stuck
    assert "stop refused" in sentence and two.id in sentence
    assert not (await host.state(one)).stuck and not released
    host.doors.refuse.clear()
    await host.quiet()
    assert released and not (await host.state(two)).stuck


async def test_a_machine_without_volumes_ends_as_ever(host: Verbs) -> None:
    sandbox = a_sandbox()
    await host.run(sandbox, "10.0.0.2")
    assert not host.end(sandbox, host.quiet) and not host.doors.told


async def test_a_volume_is_attached_and_detached_while_the_machine_runs(host: Verbs, impatient: None) -> None:
    one, _ = await two_volumes(host)
    sandbox = a_sandbox()
    mount = Mount(volume=one.id, path="/one")

    await host.run(sandbox, "10.0.0.2")
    await host.attach(sandbox, mount, host.addresses[sandbox.instance])
    assert host.doors.clients == {one.id: {"10.0.0.2": False}}
    host.doors.refuse = {("stop", one.id)}
    await host.detach(sandbox, mount)
    assert (await host.state(one)).stuck
    host.doors.refuse.clear()
    await host.quiet()
    assert host.doors.clients == {}


async def test_an_attach_that_fails_changes_nothing(host: Verbs, impatient: None) -> None:
    one, two = await two_volumes(host)
    sandbox = a_sandbox(Mount(volume=one.id, path="/one", read_only=True))

    await host.run(sandbox, "10.0.0.2")
    host.doors.refuse = {("serve", one.id), ("serve", two.id)}
    for mount in (Mount(volume=two.id, path="/two"), Mount(volume=one.id, path="/one")):
        with pytest.raises(BackendFailed, match="serve refused"):
            await host.attach(sandbox, mount, host.addresses[sandbox.instance])
    with pytest.raises(NotFound):
        await host.attach(sandbox, Mount(volume="0" * 12, path="/none"), "10.0.0.2")
    host.doors.refuse.clear()
    await host.quiet()
    assert host.doors.clients == {one.id: {"10.0.0.2": True}}


async def test_a_new_gateway_lets_in_whom_the_records_name_and_nobody_else(host: Verbs, impatient: None) -> None:
    one, two = await two_volumes(host)
    stays = a_sandbox(Mount(volume=one.id, path="/one", read_only=True), Mount(volume="0" * 12, path="/gone"))
    sleeps = a_sandbox(Mount(volume=two.id, path="/two"))
    host.addresses[stays.instance] = "10.0.0.2"
    again, scan = await reopened(host, stays, sleeps)
    assert again.doors.known == {one.id, two.id}
    assert again.doors.clients == {one.id: {"10.0.0.2": True}} and ("stop", two.id) in again.doors.told
    assert not scan.repaired
    assert [mount.path for mount in again.guest_mounts(stays)] == ["/one"]


async def test_a_server_that_does_not_answer_is_said_not_waited_for(host: Verbs) -> None:
    one, _ = await two_volumes(host)
    host.doors.refuse = {("ask", one.id)}
    assert "ask refused" in (await host.state(one)).stuck[0]


async def test_a_server_that_does_not_come_back_stops_no_gateway(host: Verbs, impatient: None) -> None:
    one, two = await two_volumes(host)
    sandbox = a_sandbox(Mount(volume=one.id, path="/one"), Mount(volume=two.id, path="/two"))
    again = Verbs(host.layout.root)
    again.addresses = {sandbox.instance: "10.0.0.2"}

    again.doors.refuse = {("serve", one.id)}
    scan = await again.scan(sandbox)
    assert any(f"volume {one.id} is not served" in sentence for sentence in scan.repaired)
    assert again.doors.clients == {two.id: {"10.0.0.2": False}}
    again.doors.refuse.clear()
    await again.quiet()
    assert again.doors.clients == {one.id: {"10.0.0.2": False}, two.id: {"10.0.0.2": False}}


# -- crash at any step -------------------------------------------------------------------------------------------------


def die(host: Verbs, work: Coroutine[Any, Any, None], fatal: int) -> int:
    """Run ``work`` in a process that dies at step ``fatal``; returns the number of steps, or KILLED."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        steps = Steps(fatal)
        try:
            sys.addaudithook(steps.on_audit)
            asyncio.run(_armed(work, steps))
            os.write(writer, str(steps.count).encode())
        finally:
            os._exit(0)
    work.close()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == KILLED or (status == 0 and said), "the verb failed"
    return int(said) if status == 0 else KILLED


async def _armed(work: Coroutine[Any, Any, None], steps: Steps) -> None:
    steps.armed = True
    await work
    steps.armed = False


VERBS: dict[str, Callable[[Verbs, Volume, VolumeSnapshot], Coroutine[Any, Any, None]]] = {
    "create": lambda host, volume, snapshot: host.create(a_volume("new")),
    "clone": lambda host, volume, snapshot: host.create(a_volume("new", 2 * SMALL), snapshot),
    "grow": lambda host, volume, snapshot: host.grow(volume, volume.size_mb + 1),
    "capture": lambda host, volume, snapshot: host.capture(a_snapshot(volume, "new")),
    "rollback": lambda host, volume, snapshot: host.rollback(volume, snapshot),
    "remove": lambda host, volume, snapshot: host.remove(volume),
    "remove-snapshot": lambda host, volume, snapshot: host.remove_snapshot(snapshot),
}


@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_any_step_leaves_things_whole_or_not_there(verb: str, root: Path) -> None:
    for fatal in itertools.count(1):
        place = root / str(fatal)
        place.mkdir()
        host = Verbs(place)
        volume, snapshot = a_volume(), None
        asyncio.run(host.create(volume))
        put(image(host, volume), "a", "one")
        snapshot = a_snapshot(volume)
        asyncio.run(host.capture(snapshot))
        put(image(host, volume), "a", "two")
        outcome = die(host, VERBS[verb](host, volume, snapshot), fatal)
        again, scan = asyncio.run(reopened(host))
        check(again, scan, verb, volume, snapshot, f"killed at step {fatal}")
        if outcome != KILLED:
            assert fatal > 2, "nothing was tried"
            return


def check(host: Verbs, scan: Scan, verb: str, volume: Volume, snapshot: VolumeSnapshot, when: str) -> None:
    assert not strays(host), when
    assert not (host.layout.root / ".damaged").exists(), (when, scan.repaired)
    found = {each.name: each for each in scan.volumes}
    parts = {each.name: each for each in scan.volume_snapshots}
    for each in scan.volumes:
        assert sound(image(host, each)), when
        assert image(host, each).stat().st_size == each.size_mb << 20, when
    for each in scan.volume_snapshots:
        assert sound(snapshot_image(host, each)), when
    if verb == "remove":
        assert (found == {} and parts == {}) or (found == {"data": volume} and parts == {"first": snapshot}), when
        return
    text = read(image(host, volume), "a")
    assert text in ("one", "two") if verb == "rollback" else text == "two", when
    assert found["data"].size_mb in ((SMALL, SMALL + 1) if verb == "grow" else (SMALL,)), when
    if verb != "remove-snapshot":
        assert read(snapshot_image(host, parts["first"]), "a") == "one", when
    if "new" in found:
        assert read(image(host, found["new"]), "a") == ("one" if verb == "clone" else ""), when
    if "new" in parts:
        assert read(snapshot_image(host, parts["new"]), "a") == "two", when


def test_killed_while_several_are_captured_leaves_all_or_none(root: Path) -> None:
    whole = 0
    for fatal in itertools.count(1):
        (root / str(fatal)).mkdir()
        host = Verbs(root / str(fatal))
        one, two = asyncio.run(two_volumes(host))
        taken = Snapshot(kind=SnapshotKind.SNAPSHOT)
        captures = [a_snapshot(one, of=taken.id), a_snapshot(two, of=taken.id)]
        outcome = die(host, host.capture_sandbox(taken, captures), fatal)
        there = tuple(path.name for path in directory_records.directories(host.layout.snapshots))
        _, scan = asyncio.run(reopened(host, snapshots=there))
        found = {each.id for each in scan.volume_snapshots}
        assert found == ({each.id for each in captures} if there else set()), f"killed at step {fatal}"
        assert not strays(host)
        whole += bool(there)
        if outcome != KILLED:
            break
    assert fatal > 8 and 0 < whole < fatal


async def test_errors_are_of_the_kind_that_callers_are_meant_to_see(host: Verbs) -> None:
    volume = a_volume()
    await host.create(volume)
    with pytest.raises(GatewayError):
        await host.rollback(volume, a_snapshot(volume))
    assert sound(image(host, volume)) and not strays(host)
