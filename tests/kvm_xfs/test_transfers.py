"""Test exporting snapshots of virtual machines to files and importing them, without machines and with real ones."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sandbox_gateway.engine.transfer.container import Decoder
from sandbox_gateway.errors import Conflict, Invalid
from sandbox_gateway.hosts.base import MEMORY_PARTS, SnapshotPart
from sandbox_gateway.hosts.kvm_xfs import commit_protocol, part_files, transfer
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout, MemoryDirectory
from sandbox_gateway.hosts.kvm_xfs.files.snapshots import Snapshots
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.records import MemoryMode, Resources, Snapshot
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.waiting import wait_until
from tests.support.xfs import LoopXfs

MIB = 1 << 20
PLATFORM = {"accelerator": "tcg", "cpu_model": "max", "machine": "pc-q35-7.2", "qemu_version": "7.2.1"}
SIZES = {
    SnapshotPart.KERNEL: 5000,
    SnapshotPart.INITRD: 6000,
    SnapshotPart.DISK: 64 * MIB,
    SnapshotPart.MEMORY: 64 * MIB,
    SnapshotPart.DEVICE_STATE: 3000,
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    # the file system of temporary files may lack FIEMAP
    monkeypatch.setattr(reflink, "count_unique_bytes", lambda path: 0)
    layout = Layout(tmp_path / "state")
    layout.create()
    return Snapshots(layout, Quarantine(tmp_path / "state"))


def start_import(store: Snapshots, snapshot: Snapshot) -> transfer.SnapshotFileTarget:
    target = transfer.SnapshotFileTarget(store, snapshot, PLATFORM, line=True)
    has_memory = snapshot.memory is not MemoryMode.NONE
    target.create({part: size for part, size in SIZES.items() if has_memory or part not in MEMORY_PARTS})
    target.write(SnapshotPart.KERNEL, 0, b"k" * 5000)
    target.write(SnapshotPart.DISK, 32 * MIB, b"d" * 4096)
    if has_memory:
        target.write(SnapshotPart.MEMORY, 8 * MIB, b"m" * 4096)
        target.write(SnapshotPart.DEVICE_STATE, 0, b"s" * 3000)
    return target


def make_snapshot(memory: MemoryMode = MemoryMode.FULL) -> Snapshot:
    return Snapshot(memory=memory, resources=Resources(memory_mb=64))


@pytest.mark.anyio
async def test_an_import_is_sparse_and_exists_only_after_its_commit(
    store: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_paths: list[str] = []
    sync_files = commit_protocol.sync_files
    monkeypatch.setattr(
        commit_protocol, "sync_files", lambda paths: [synced_paths.extend(p.name for p in paths), sync_files(paths)]
    )
    snapshot = make_snapshot()
    target = start_import(store, snapshot)
    assert store.scan([]) == []
    await target.commit()
    assert {"kernel", "initrd", "rootfs.img", "memory.img", "device.state"} <= {*synced_paths}
    (found,) = store.scan([])
    assert (found.id, found.host["platform"], found.host["line"]) == (snapshot.id, PLATFORM, True)
    assert found.host["image"]["size"] == 64 * MIB
    source = transfer.SnapshotFileSource(store.files(found), found, memory=True)
    assert source.sizes == SIZES and source.platform == PLATFORM and source.line
    assert [end - start < MIB for part in SIZES for start, end in source.extents(part)] == [True] * 4
    assert source.read(SnapshotPart.DISK, 32 * MIB - 1, 3) == b"\0dd"
    store.remove(found)
    assert source.read(SnapshotPart.MEMORY, 8 * MIB, 2) == b"mm", "an export does not depend on the snapshot"
    source.close()
    with pytest.raises(Conflict, match="is being removed"):
        transfer.SnapshotFileSource(store.files(found), found, memory=True)


@pytest.mark.anyio
@pytest.mark.parametrize("in_memory_root", [False, True])
async def test_a_discarded_import_leaves_nothing_behind(store: Snapshots, tmp_path: Path, in_memory_root: bool) -> None:
    snapshot = make_snapshot()
    if in_memory_root:
        directory = MemoryDirectory(tmp_path / "root", "gateway")
        directory.snapshots.mkdir(parents=True)
        directory.record_location(snapshot)
    target = start_import(store, snapshot)
    files = store.partial_files(snapshot)
    assert files.memory.exists() and files.directory.exists()
    await target.discard()
    assert not files.memory.exists() and not files.directory.exists()


@pytest.mark.anyio
async def test_without_memory_no_memory_file_is_created(store: Snapshots) -> None:
    snapshot = make_snapshot(MemoryMode.NONE)
    await start_import(store, snapshot).commit()
    files = store.files(snapshot)
    assert not files.memory.exists() and not files.device_state.exists()
    assert "platform" not in store.scan([])[0].host


def test_memory_requires_the_same_platform_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transfer.find_platform_problem(PLATFORM, PLATFORM) == ""
    for key in PLATFORM:
        problem = transfer.find_platform_problem(PLATFORM, {**PLATFORM, key: "other"})
        assert problem.startswith(f"it was captured with {key.replace('_', ' ')} 'other'")
    host = {**PLATFORM, "cpu_model": "host"}
    cpus = []
    for name, mhz in (("one", 1000), ("one", 2000), ("two", 1000)):
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: {name}\ncpu MHz\t\t: {mhz}\n\nprocessor\t: 1\n"
        )
        monkeypatch.setattr(transfer, "_CPU_INFO", tmp_path / "cpuinfo")
        cpus.append(transfer.build_portable_platform(host))
    assert cpus[0] == cpus[1] != cpus[2]
    assert transfer.find_platform_problem(host, cpus[2]) == ""
    assert "cpu model" in transfer.find_platform_problem(host, cpus[0])
    assert "cpu model" in transfer.find_platform_problem(host, host)


def compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(file: bytes) -> Iterator[bytes]:
    """Yield pieces of a large file: the HTTP client copies the rest of a body each time it has sent a part of it."""
    for start in range(0, len(file), MIB):
        yield file[start : start + MIB]


def check_shared_import(gateway: Gateway, file: bytes, names: Sequence[str], digests: list[str]) -> None:
    """Import a file of a snapshot that the host still has. Nearly all of its disk and memory is shared."""
    response = gateway.client.post("/snapshots/import", params={"name": "shared"}, content=split(file))
    assert response.status_code == 201, response.text
    directory = gateway.state_root / "snapshots" / response.json()["snapshotID"]
    assert [compute_digest(directory / name) for name in names] == digests
    for name in ("rootfs.img", "memory.img"):
        extents = [*reflink.walk_extents(directory / name)]
        shared_bytes = sum(extent.length for extent in extents if extent.is_shared)
        assert shared_bytes > 0.5 * sum(extent.length for extent in extents) > 0, name
    gateway.call("DELETE", "/snapshots/shared")


def check_truncated_files(file: bytes) -> None:
    """Check that a file is incomplete if it is cut at the boundary of a record, a byte beside it, or anywhere else."""
    edges, position = [0, 21], 21
    while position < len(file):
        position += 5 + int.from_bytes(file[position + 1 : position + 5], "big")
        edges.append(position)
    assert edges[-1] == len(file)
    beside_edges = {edge + shift for edge in edges for shift in (-1, 0, 1)}
    generator = random.Random(1)
    places = {place for place in beside_edges if 0 <= place < len(file)}
    places |= {generator.randrange(len(file)) for _ in range(1000)}
    decoder, start = Decoder(), 0
    for end in sorted(places):
        decoder.feed(file[start:end])
        for _ in decoder.read_chunks():
            pass
        start = end
        with pytest.raises(Invalid, match=r"is (empty|incomplete)"):
            decoder.close()
    decoder.feed(file[start:])
    for _ in decoder.read_chunks():
        pass
    decoder.close()


def test_a_machine_continues_from_an_imported_snapshot_whose_original_is_gone(
    gateway: Callable[..., Gateway],
) -> None:
    one = gateway()
    one.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source", "timeout": -1})
    one.sh("source", "echo on the disk >/root/disk; head -c 8000000 /dev/urandom >/dev/shm/noise; sync")
    one.sh("source", "sh -c 'while :; do echo $$ >/run/running; sleep 0.2; done' </dev/null >/dev/null 2>&1 &")
    one.sh("source", "while ! [ -s /run/running ]; do sleep 0.1; done")
    expected = one.sh("source", "cat /root/disk /run/running; sha256sum /dev/shm/noise")
    original = one.call("POST", "/sandboxes/source/snapshots", {"name": "taken"})
    response = one.client.get("/snapshots/taken/export")
    assert response.status_code == 200, response.text
    file = response.content
    directory = one.state_root / "snapshots" / original["snapshotID"]
    names = ("rootfs.img", "memory.img", "device.state", "kernel", "initrd")
    digests = [compute_digest(directory / name) for name in names]
    check_shared_import(one, file, names, digests)
    one.call("DELETE", "/sandboxes/source")
    one.call("DELETE", "/snapshots/taken")
    assert not directory.exists()
    response = one.client.post("/snapshots/import", content=split(file))
    assert response.status_code == 201, response.text
    imported = response.json()
    assert (imported["memory"], imported["imported"]["omittedMemory"]) == ("full", "")
    directory = one.state_root / "snapshots" / imported["snapshotID"]
    assert [compute_digest(directory / name) for name in names] == digests
    assert (directory / "memory.img").stat().st_blocks * 512 < 256 * MIB
    one.restart()
    one.call("POST", "/snapshots/taken/fork", {"name": "fork"})
    one.sh("fork", "rm /run/running; while ! [ -s /run/running ]; do sleep 0.1; done")
    assert one.sh("fork", "cat /root/disk /run/running; sha256sum /dev/shm/noise") == expected
    one.call("POST", "/sandboxes/fork/snapshots", {"name": "again"})
    check_truncated_files(file)


def test_a_machine_continues_from_a_file_with_what_has_changed(gateway: Callable[..., Gateway]) -> None:
    one = gateway()
    one.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "source", "timeout": -1})
    one.sh("source", "head -c 8000000 /dev/urandom | tee /root/noise >/dev/shm/noise; sync")
    one.call("POST", "/sandboxes/source/snapshots", {"name": "monday"})
    # The blocks of the first file become free, those of the second one become zeros.
    one.sh("source", "head -c 8000000 /dev/zero >/dev/shm/noise; echo tuesday | tee /root/day >/dev/shm/day; sync")
    tuesday = one.call("POST", "/sandboxes/source/snapshots", {"name": "tuesday"})
    directory = one.state_root / "snapshots" / tuesday["snapshotID"]
    names = ("rootfs.img", "memory.img", "device.state", "kernel", "initrd")
    digests = [compute_digest(directory / name) for name in names]
    whole, part, without_memory = (
        one.client.get("/snapshots/tuesday/export", params=params).content
        for params in ({}, {"since": "monday"}, {"since": "monday", "memory": "none"})
    )
    assert len(without_memory) < len(part) < len(whole) / 4
    one.call("DELETE", "/sandboxes/source")
    one.call("DELETE", "/snapshots/tuesday")
    for file, memory in ((part, "full"), (without_memory, "none")):
        response = one.client.post("/snapshots/import", content=split(file))
        assert response.status_code == 201, response.text
        imported = response.json()
        monday = one.call("GET", "/snapshots/monday")
        assert (imported["memory"], imported["parentSnapshotID"]) == (memory, monday["snapshotID"])
        directory = one.state_root / "snapshots" / imported["snapshotID"]
        assert [compute_digest(directory / name) for name in names if (directory / name).exists()] == (
            digests if memory == "full" else [digests[0], *digests[3:]]
        )
        one.call("POST", "/snapshots/tuesday/fork", {"name": "fork"})
        days = "/dev/shm/day /root/day" if memory == "full" else "/root/day"
        assert {*one.sh("fork", f"cat {days}").split()} == {"tuesday"}
        one.call("DELETE", "/sandboxes/fork")
        one.call("DELETE", "/snapshots/tuesday")
    one.call("DELETE", "/snapshots/monday")
    refused = one.client.post("/snapshots/import", content=split(part))
    assert (refused.status_code, refused.json()["kind"]) == (404, "not_found"), refused.text
    assert "differs from snapshot 'monday'" in refused.json()["message"]
    assert [*one.state_root.glob("snapshots/*")] == [*one.state_root.glob("snapshots/.partial-*")] == []


def test_a_killed_import_leaves_nothing_behind(gateway: Callable[..., Gateway]) -> None:
    one = gateway()
    file = one.client.get(f"/snapshots/{TEMPLATE}/export", params={"memory": "none"}).content
    templates = one.state_root / "templates"
    before = sorted(path.name for path in templates.iterdir())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(one.socket))
        head = f"POST /snapshots/import?name=new HTTP/1.1\r\nHost: x\r\nContent-Length: {len(file)}\r\n\r\n"
        client.sendall(head.encode() + file[: len(file) // 2])
        wait_until(lambda: [*templates.glob(".partial-*/rootfs.img")])
        one.kill()
    assert [*templates.glob(".partial-*")]
    one.start()
    assert sorted(path.name for path in templates.iterdir()) == before
    one.call("GET", "/snapshots/new", status=404)


# -- data that a local snapshot has ------------------------------------------------------------------------------------


def change_blocks(data: bytes, *numbers: int) -> bytes:
    """Return ``data`` with another first byte in each of these blocks of 4 KiB."""
    changed_data = bytearray(data)
    for number in numbers:
        changed_data[number * 4096] ^= 1
    return bytes(changed_data)


def test_equal_runs_are_long_and_consist_of_whole_blocks() -> None:
    data = random.Random(1).randbytes(256 * 4096)
    for changed_blocks, runs in (
        ([], [(0, 256)]),
        ([0], [(1, 256)]),
        ([255], [(0, 255)]),
        ([15, 200], [(16, 200), (201, 256)]),
        ([16, 32, 50], [(0, 16), (33, 50), (51, 256)]),
        (range(0, 256, 16), []),
    ):
        expected = [(start * 4096, end * 4096) for start, end in runs]
        assert transfer._list_equal_runs(change_blocks(data, *changed_blocks), data) == expected
    assert transfer._list_equal_runs(data, data[: 40 * 4096 + 5]) == [(0, 40 * 4096)]
    assert transfer._list_equal_runs(data[: 40 * 4096 + 5], data) == [(0, 40 * 4096)]
    assert transfer._list_equal_runs(data[:4096], data) == transfer._list_equal_runs(data, b"") == []


@pytest.fixture(params=[True, False], ids=["reflink", "no reflink"])
def xfs_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Snapshots]:
    """The store of snapshots on a real XFS file system."""
    with LoopXfs(tmp_path / "image", tmp_path / "mount", size_mb=320, reflink=request.param) as xfs:
        layout = Layout(xfs.mount_point / "state")
        layout.create()
        yield Snapshots(layout, Quarantine(xfs.mount_point / "state"))


@pytest.mark.anyio
async def test_a_part_begins_with_the_contents_of_the_base(
    xfs_store: Snapshots, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_reflink = "no reflink" not in request.node.name  # A memory root may be on such a file system.
    base_snapshot = make_snapshot()
    await start_import(xfs_store, base_snapshot).commit()
    base_paths = transfer.list_base_paths(xfs_store.files(base_snapshot), {SnapshotPart.DISK, SnapshotPart.MEMORY})
    snapshot = make_snapshot()
    target = transfer.SnapshotFileTarget(xfs_store, snapshot, PLATFORM, line=True)
    target.create(SIZES, base_paths)
    target.write(SnapshotPart.DISK, 32 * MIB, bytes(4096))
    target.write(SnapshotPart.DISK, 0, b"n" * 4096)
    target.write(SnapshotPart.DEVICE_STATE, 0, b"s" * 3000)
    await target.commit()
    files, base_files = xfs_store.files(snapshot), xfs_store.files(base_snapshot)
    assert files.memory.read_bytes() == base_files.memory.read_bytes()
    assert files.disk.read_bytes() == b"n" * 4096 + bytes(64 * MIB - 4096)
    with contextlib.closing(transfer.SnapshotFileSource(files, snapshot, memory=True, base=base_files)) as source:
        assert source.relative_parts == {*SnapshotPart} & SIZES.keys() - {SnapshotPart.DEVICE_STATE}
        unshared = [] if has_reflink else [(8 * MIB, 8 * MIB + 4096)]
        assert [*source.extents(SnapshotPart.MEMORY)] == unshared
        # The block of zeros is a hole.
        assert [*source.extents(SnapshotPart.DISK)] == [(0, 4096), (32 * MIB, 32 * MIB + 4096)]
        assert [*reflink.list_data_ranges(source.get_descriptor(SnapshotPart.DISK) or 0)] == [(0, 4096)]
        monkeypatch.setattr(reflink, "_MAX_COMPARED_EXTENTS", 0)
        assert [*source.extents(SnapshotPart.MEMORY)] == [(8 * MIB, 8 * MIB + 4096)]
        assert [*source.extents(SnapshotPart.DISK)] == [(0, 4096), (32 * MIB, 32 * MIB + 4096)]
    with monkeypatch.context() as patch:
        patch.setattr(part_files, "can_list_extents", lambda descriptor: False)
        with contextlib.closing(transfer.SnapshotFileSource(files, snapshot, memory=True, base=base_files)) as source:
            assert source.relative_parts == set()
    other = make_snapshot()
    other_target = transfer.SnapshotFileTarget(xfs_store, other, PLATFORM, line=True)
    with pytest.raises(Invalid, match="the disk of the snapshot that the file needs has another size here"):
        other_target.create({**SIZES, SnapshotPart.DISK: 32 * MIB}, base_paths)
    await other_target.discard()
    assert {each.id for each in xfs_store.scan([])} == {snapshot.id, base_snapshot.id}


@pytest.mark.anyio
async def test_data_that_a_local_snapshot_has_is_not_written_again(
    xfs_store: Snapshots, request: pytest.FixtureRequest
) -> None:
    has_reflink = "no reflink" not in request.node.name
    disk = random.Random(2).randbytes(8 * MIB)
    base_snapshot = make_snapshot(MemoryMode.NONE)
    base_target = start_import(xfs_store, base_snapshot)
    base_target.write(SnapshotPart.DISK, MIB, disk)
    await base_target.commit()
    base = transfer.SnapshotFileSource(xfs_store.files(base_snapshot), base_snapshot, memory=False)
    # The second snapshot has other data in two blocks, and nothing where the base has its last MiB.
    new_disk = change_blocks(disk[: 7 * MIB], 100, 1500)
    snapshot = make_snapshot(MemoryMode.NONE)
    target = start_import(xfs_store, snapshot)
    target.use_bases([base])
    for start in range(0, len(new_disk), MIB):
        target.write(SnapshotPart.DISK, MIB + start, new_disk[start : start + MIB])
    target.use_bases([])
    base.close()
    await target.commit()
    image = xfs_store.files(snapshot).disk
    contents = image.read_bytes()
    assert contents[MIB : 8 * MIB] == new_disk and not any(contents[8 * MIB : 32 * MIB])
    assert contents[32 * MIB :].startswith(b"d" * 4096) and len(contents) == 64 * MIB
    shared_bytes = sum(extent.length for extent in reflink.walk_extents(image) if extent.is_shared)
    assert shared_bytes == (len(new_disk) - 2 * 4096 if has_reflink else 0)
    xfs_store.remove(base_snapshot)
    assert image.read_bytes() == contents, "the new snapshot depends on the old one"
