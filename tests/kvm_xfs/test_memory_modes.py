"""Test each memory mode on a running machine: the captured image must equal the machine's memory, byte for byte."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import statistics
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.kvm_xfs import capture
from sandbox_gateway.hosts.kvm_xfs.memory import listing
from sandbox_gateway.hosts.kvm_xfs.memory.copying import Copier
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import WriteTracking
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import MemoryMode, Snapshot
from tests.support.live import EngineRunner
from tests.support.samples import mark_slow_except
from tests.support.worlds import TEMPLATE, KvmXfsWorld

CAPTURE_COUNT = int(os.environ.get("GROVE_TEST_CAPTURES", "4"))
"""The number of captures in each mode."""
WRITER_PROGRAM = """
import os, mmap, time
os.nice(10)
blob = mmap.mmap(-1, 24 << 20)
disk = os.open('/dev/vda', os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 1 << 20)
number = 0
while True:
    number += 1
    page = number * 7919 % (len(blob) >> 12)
    blob[page << 12 : (page << 12) + 8] = number.to_bytes(8, 'little')
    if number % 50 == 0:
        os.preadv(disk, [buffer], number % 500 << 20)
    if number % 2000 == 0:
        time.sleep(0.01)
"""
"""A guest program that writes to memory continuously, and reads the disk into memory, bypassing the cache."""

DIRECT_READER_PROGRAM = """
import os, mmap
size = 64 << 10
os.system('head -c 8388608 /dev/urandom >/root/noise; sync')
disk = os.open('/root/noise', os.O_RDONLY | os.O_DIRECT)
blob = memoryview(mmap.mmap(-1, 127 * size))
number = 0
while True:
    number += 1
    place = number % 127 * size
    os.preadv(disk, [blob[place : place + size]], number % 128 * size)
"""
"""A guest program that reads different parts of a file into the same memory, past the cache."""


@pytest.fixture
def runner(kvm_xfs_world: KvmXfsWorld, request: pytest.FixtureRequest) -> Iterator[EngineRunner]:
    mode = getattr(request, "param", "auto")
    config = kvm_xfs_world.make_config(kvm_xfs={"uid_base": 700_000, "memory_mode": mode})
    runner = EngineRunner(kvm_xfs_world.make_host(config), config)
    yield runner
    runner.remove_all()
    runner.close()
    kvm_xfs_world.clean_up(config)


@pytest.fixture
def source(runner: EngineRunner) -> str:
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    return "source"


class MemoryRecorder:
    """A recorder that saves the memory of a machine just before the machine resumes.

    After a capture, ``last_memory`` is the memory during the last stop of the capture.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last_memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        original_resume = Machine.cont

        async def record_and_resume(machine: Machine) -> None:
            ram = Ram(machine.pid, machine.files.memory)
            self.last_memory = np.empty(sum(area.end - area.start for area in ram.areas), dtype=np.uint8)
            ram.read(ram.list_all_pages(), self.last_memory)
            await original_resume(machine)

        monkeypatch.setattr(Machine, "cont", record_and_resume)

    def find_differing_pages(self, image: Path) -> list[int]:
        """Return the numbers of the pages of ``image`` that differ from the recorded memory."""
        contents = np.fromfile(image, dtype=np.uint8)
        assert len(contents) == len(self.last_memory)
        return np.flatnonzero((contents != self.last_memory).reshape(-1, PAGE_BYTES).any(axis=1)).tolist()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> MemoryRecorder:
    return MemoryRecorder(monkeypatch)


def get_memory_image_path(runner: EngineRunner, snapshot: Snapshot) -> Path:
    return runner.config.host.state_root / "snapshots" / snapshot.id / "memory.img"


@pytest.fixture
def disable_live_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy all memory in one stop, even if a guest on a slow machine writes many pages between two captures."""
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)


def capture_source(runner: EngineRunner) -> Snapshot:
    return runner.do(runner.engine.snapshots.create("source"))


def skip_without_soft_dirty_bits(runner: EngineRunner) -> None:
    if runner.config.kvm_xfs.memory_mode == "soft_dirty" and not listing.has_soft_dirty_bits():
        pytest.skip("this kernel does not support soft-dirty bits; test_soft_dirty.py tests them in a guest")


def start_writer(runner: EngineRunner, program: str = WRITER_PROGRAM) -> None:
    runner.shell("source", f"cat >/root/writer.py <<'END'\n{program}\nEND")
    runner.shell(
        "source",
        "setsid python3 /root/writer.py </dev/null >/root/writer.log 2>&1 & sleep 1; ! test -s /root/writer.log",
    )


@pytest.mark.parametrize(
    ("runner", "expected_mode"),
    [
        ("written", MemoryMode.WRITTEN),
        ("soft_dirty", MemoryMode.SOFT_DIRTY),
        ("compare", MemoryMode.COMPARE),
        ("incremental", MemoryMode.INCREMENTAL),
        ("full", MemoryMode.FULL),
    ],
    indirect=["runner"],
)
def test_captured_image_equals_the_memory(
    runner: EngineRunner,
    source: str,
    recorder: MemoryRecorder,
    expected_mode: MemoryMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    skip_without_soft_dirty_bits(runner)
    start_writer(runner)
    for number in range(CAPTURE_COUNT):
        runner.shell("source", f"sleep {random.random() / 5:.3f}")
        snapshot = capture_source(runner)
        has_nothing_to_compare = number == 0 and expected_mode is MemoryMode.COMPARE
        assert snapshot.memory is (MemoryMode.INCREMENTAL if has_nothing_to_compare else expected_mode), snapshot.host
        assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []
        assert "degraded" not in snapshot.host
        runner.do(runner.engine.snapshots.delete(snapshot.id))


@pytest.mark.parametrize("runner", ["written", "soft_dirty"], indirect=True)
def test_image_of_a_live_capture_equals_the_memory(
    runner: EngineRunner, source: str, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_soft_dirty_bits(runner)
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 256 << 10)
    start_writer(runner)
    stop_counts = []
    for _ in range(CAPTURE_COUNT):
        runner.shell("source", f"sleep {random.random() / 5:.3f}")
        snapshot = capture_source(runner)
        assert snapshot.memory is MemoryMode.LIVE, snapshot.host
        assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []
        stop_counts.append(len(snapshot.host["stops_ms"]))
        runner.do(runner.engine.snapshots.delete(snapshot.id))
    assert max(stop_counts) >= 2


@pytest.fixture
def make_reads_slow(runner: EngineRunner, source: str) -> Iterator[None]:
    """Delay reads of the source's QEMU process, so that one is nearly always in flight, in the kernel."""
    group = Path("/sys/fs/cgroup/blkio") / f"{runner.config.network.prefix}-slow-reads"
    if not (group.parent / "blkio.throttle.read_bps_device").exists():
        pytest.skip("the kernel cannot limit the rate of reads (controller blkio, version 1)")
    device = runner.config.host.state_root.stat().st_dev
    group.mkdir()
    (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {2 << 20}")
    (group / "cgroup.procs").write_text(str(runner.get_sandbox(source).host["pid"]))
    yield
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


@pytest.mark.parametrize("runner", ["written"], indirect=True)
def test_reads_in_flight_are_not_lost_by_a_live_capture(
    runner: EngineRunner,
    source: str,
    recorder: MemoryRecorder,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device writes to pages that it pinned before their marks were taken, and so does not mark them again."""
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 64 << 10)
    start_writer(runner, DIRECT_READER_PROGRAM)
    capture_source(runner)
    request.getfixturevalue("make_reads_slow")
    for _ in range(max(CAPTURE_COUNT, 4)):
        runner.shell("source", "sleep 0.2")
        snapshot = capture_source(runner)
        assert snapshot.memory is MemoryMode.LIVE, snapshot.host
        assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []
        runner.do(runner.engine.snapshots.delete(snapshot.id))


@pytest.mark.parametrize(
    ("runner", "max_single_stop_bytes"),
    [
        pytest.param("written", 1 << 40, id="written"),
        pytest.param("written", 256 << 10, id="live"),
        pytest.param("compare", 1 << 40, id="compare"),
        pytest.param("soft_dirty", 1 << 40, id="soft_dirty", marks=pytest.mark.slow),
        pytest.param("incremental", 1 << 40, id="incremental", marks=pytest.mark.slow),
        pytest.param("full", 1 << 40, id="full", marks=pytest.mark.slow),
    ],
    indirect=["runner"],
)
def test_fork_has_the_memory_of_the_capture(
    runner: EngineRunner, source: str, max_single_stop_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest itself computes the checksums, while another of its programs writes to memory and reads the disk."""
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", max_single_stop_bytes)
    skip_without_soft_dirty_bits(runner)
    runner.shell("source", "head -c 20000000 /dev/urandom >/dev/shm/blob")
    start_writer(runner)
    for number in range(CAPTURE_COUNT):
        runner.shell(
            "source",
            f"head -c 100000 /dev/urandom | dd of=/dev/shm/blob bs=100000 seek={number % 200} conv=notrunc 2>&1",
        )
        digest = runner.shell("source", "sha256sum /dev/shm/blob")
        snapshot = capture_source(runner)
        fork = runner.do(runner.engine.forks.create(snapshot.id, ForkSpec()))
        assert runner.shell(fork.id, "sha256sum /dev/shm/blob") == digest
        runner.do(runner.engine.sandboxes.delete(fork.id))
        runner.do(runner.engine.snapshots.delete(snapshot.id))


def test_capture_writes_only_changed_pages(runner: EngineRunner, source: str, disable_live_captures: None) -> None:
    runner.shell("source", "head -c 60000000 /dev/urandom >/dev/shm/blob")
    capture_source(runner)
    written_byte_counts = []
    for _ in range(5):
        runner.shell("source", "head -c 5000000 /dev/urandom | dd of=/dev/shm/blob conv=notrunc bs=64k 2>&1")
        written_byte_counts.append(capture_source(runner).memory_bytes_written)
    # In some rounds, the guest itself changes about 5 MB more, for example when it reads programs for the first time.
    assert (
        min(written_byte_counts) > 5_000_000
        and statistics.median(written_byte_counts) < 12_000_000
        and max(written_byte_counts) < 30_000_000
    ), written_byte_counts


FailureInjector = Callable[[pytest.MonkeyPatch], None]


def make_writes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.copying.write_all", fail)


def make_device_save_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise BackendFailed("no device state")

    monkeypatch.setattr(Machine, "save_devices", fail)


def make_completion_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(WriteTracking, "complete", fail)


def make_reads_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BackendFailed("the memory cannot be read")

    monkeypatch.setattr(Copier, "buffer", fail)


def make_listing_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel fail after it has listed some pages and has taken their marks."""
    taken_pages: list[int] = []
    original_ioctl = fcntl.ioctl

    def take_once(descriptor: int, request: int, argument: bytearray) -> int:
        is_scan = request == listing._PAGEMAP_SCAN
        takes_marks = is_scan and bool(struct.unpack_from("=2Q", argument)[1] & listing._PROTECT_MATCHING)
        if takes_marks and taken_pages:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        count = original_ioctl(descriptor, request, argument)
        if takes_marks:
            taken_pages.append(count)
        return count

    monkeypatch.setattr(listing, "_MAX_SCAN_REGIONS", 4)
    monkeypatch.setattr(listing.fcntl, "ioctl", take_once)


@pytest.mark.parametrize(
    ("inject_failure", "expected_mode"),
    [
        (make_writes_fail, MemoryMode.WRITTEN),
        (make_device_save_fail, MemoryMode.WRITTEN),
        (make_completion_fail, MemoryMode.WRITTEN),
        (make_reads_fail, MemoryMode.WRITTEN),
        (make_listing_fail, MemoryMode.COMPARE),
    ],
)
def test_capture_after_a_failed_capture_is_complete(
    runner: EngineRunner,
    source: str,
    recorder: MemoryRecorder,
    disable_live_captures: None,
    inject_failure: FailureInjector,
    expected_mode: MemoryMode,
) -> None:
    start_writer(runner)
    capture_source(runner)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            inject_failure(patch)
            with pytest.raises(GatewayError):
                capture_source(runner)
    for mode in (expected_mode, MemoryMode.WRITTEN):
        snapshot = capture_source(runner)
        assert snapshot.memory is mode
        assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []


def get_machine_directory(runner: EngineRunner) -> Path:
    sandbox = runner.get_sandbox("source")
    return runner.config.host.state_root / "sandboxes" / sandbox.id / sandbox.instance


def truncate(image: Path) -> None:
    image.unlink()
    image.write_bytes(b"short")


def overwrite(image: Path) -> None:
    contents = bytearray(image.read_bytes())
    image.unlink()
    image.write_bytes(bytes(255 - byte for byte in contents))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (overwrite, "has changed"),
        pytest.param(truncate, "wrong size", marks=pytest.mark.slow),
        pytest.param(Path.unlink, "No such file", marks=pytest.mark.slow),
    ],
)
def test_capture_does_not_use_a_damaged_base(
    runner: EngineRunner,
    source: str,
    recorder: MemoryRecorder,
    damage: Callable[[Path], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    start_writer(runner)
    capture_source(runner)
    damage(get_machine_directory(runner) / "memory.last")
    snapshot = capture_source(runner)
    assert reason in snapshot.host["degraded"]
    assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []
    next_snapshot = capture_source(runner)
    assert (next_snapshot.memory, "degraded" in next_snapshot.host) == (MemoryMode.WRITTEN, False)
    assert recorder.find_differing_pages(get_memory_image_path(runner, next_snapshot)) == []


@pytest.mark.parametrize("runner", mark_slow_except(("written",), ("written", "compare")), indirect=True)
def test_a_capture_after_a_new_boot_does_not_use_the_previous_image(
    runner: EngineRunner, source: str, recorder: MemoryRecorder
) -> None:
    capture_source(runner)
    runner.do(runner.engine.machines.mark_stopped(runner.get_sandbox("source"), "the test stopped it"))
    runner.do(runner.engine.sandboxes.resume("source"))
    snapshot = capture_source(runner)
    assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []


def test_tracked_writes_are_ignored_after_an_interrupted_capture(
    kvm_xfs_world: KvmXfsWorld, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    config = kvm_xfs_world.make_config()
    runner = EngineRunner(kvm_xfs_world.make_host(config), config)
    runner.do(runner.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    start_writer(runner)
    capture_source(runner)
    with pytest.MonkeyPatch.context() as patch:
        make_writes_fail(patch)
        with pytest.raises(GatewayError):
            capture_source(runner)
    runner.close()
    runner = EngineRunner(kvm_xfs_world.make_host(config), config)
    first_snapshot, second_snapshot = capture_source(runner), capture_source(runner)
    assert (first_snapshot.memory, first_snapshot.host["degraded"]) == (
        MemoryMode.COMPARE,
        "an earlier capture was interrupted",
    )
    assert (second_snapshot.memory, "degraded" in second_snapshot.host) == (MemoryMode.WRITTEN, False)
    assert recorder.find_differing_pages(get_memory_image_path(runner, second_snapshot)) == []
    runner.remove_all()
    runner.close()
    kvm_xfs_world.clean_up(config)


def test_capture_without_a_tracker_uses_the_next_best_mode(
    runner: EngineRunner,
    source: str,
    recorder: MemoryRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(1, "the page tracker failed: Operation not permitted")

    monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.tracker_client.TrackerClient.track", fail)
    capture_source(runner)
    snapshot = capture_source(runner)
    assert snapshot.memory in (MemoryMode.SOFT_DIRTY, MemoryMode.COMPARE)
    assert "not permitted" in snapshot.host["degraded"]
    assert caplog.text.count("captures do not use the best memory mode") == 1
    assert recorder.find_differing_pages(get_memory_image_path(runner, snapshot)) == []
