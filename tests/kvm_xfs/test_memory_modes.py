"""Test each memory mode on a running machine: the captured image must equal the machine's memory, byte for byte."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.kvm_xfs import capture
from sandbox_gateway.hosts.kvm_xfs.memory import listing
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.write_tracking import WriteTracking
from sandbox_gateway.hosts.kvm_xfs.qemu.machine import Machine
from sandbox_gateway.records import MemoryMode, Snapshot
from tests.support.live import Live
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


@pytest.fixture
def live(kvm_xfs_world: KvmXfsWorld, request: pytest.FixtureRequest) -> Iterator[Live]:
    mode = getattr(request, "param", "auto")
    config = kvm_xfs_world.make_config(kvm_xfs={"uid_base": 700_000, "memory_mode": mode})
    live = Live(kvm_xfs_world.make_host(config), config)
    yield live
    live.remove_all()
    live.close()
    kvm_xfs_world.clean_up(config)


@pytest.fixture
def source(live: Live) -> str:
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
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
            ram.read(ram.all_pages(), self.last_memory)
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


def get_memory_image_path(live: Live, snapshot: Snapshot) -> Path:
    return live.config.host.state_root / "snapshots" / snapshot.id / "memory.img"


@pytest.fixture
def disable_live_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy all memory in one stop, even if a guest on a slow machine writes many pages between two captures."""
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)


def capture_source(live: Live) -> Snapshot:
    return live.do(live.engine.snapshots.create("source"))


def start_writer(live: Live) -> None:
    live.shell("source", f"cat >/root/writer.py <<'END'\n{WRITER_PROGRAM}\nEND")
    live.shell(
        "source",
        "setsid python3 /root/writer.py </dev/null >/root/writer.log 2>&1 & sleep 1; ! test -s /root/writer.log",
    )


@pytest.mark.parametrize(
    ("live", "expected_mode"),
    [
        ("written", MemoryMode.WRITTEN),
        ("soft_dirty", MemoryMode.SOFT_DIRTY),
        ("compare", MemoryMode.COMPARE),
        ("incremental", MemoryMode.INCREMENTAL),
        ("full", MemoryMode.FULL),
    ],
    indirect=["live"],
)
def test_captured_image_equals_the_memory(
    live: Live, source: str, recorder: MemoryRecorder, expected_mode: MemoryMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    if expected_mode is MemoryMode.SOFT_DIRTY and not listing.has_soft_dirty_bits():
        pytest.skip("this kernel does not support soft-dirty bits")
    start_writer(live)
    for number in range(CAPTURE_COUNT):
        live.shell("source", f"sleep {random.random() / 5:.3f}")
        snapshot = capture_source(live)
        has_nothing_to_compare = number == 0 and expected_mode is MemoryMode.COMPARE
        assert snapshot.memory is (MemoryMode.INCREMENTAL if has_nothing_to_compare else expected_mode), snapshot.host
        assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []
        assert "degraded" not in snapshot.host
        live.do(live.engine.snapshots.delete(snapshot.id))


def test_image_of_a_live_capture_equals_the_memory(
    live: Live, source: str, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 256 << 10)
    start_writer(live)
    stop_counts = []
    for _ in range(CAPTURE_COUNT):
        live.shell("source", f"sleep {random.random() / 5:.3f}")
        snapshot = capture_source(live)
        assert snapshot.memory is MemoryMode.LIVE, snapshot.host
        assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []
        stop_counts.append(len(snapshot.host["stops_ms"]))
        live.do(live.engine.snapshots.delete(snapshot.id))
    assert max(stop_counts) >= 2


def test_fork_has_the_memory_of_the_capture(live: Live, source: str) -> None:
    live.shell("source", "head -c 20000000 /dev/urandom >/dev/shm/blob")
    for number in range(3):
        live.shell(
            "source", f"head -c 100000 /dev/urandom | dd of=/dev/shm/blob bs=1 seek={number}00000 conv=notrunc 2>&1"
        )
        digest = live.shell("source", "sha256sum /dev/shm/blob")
        snapshot = capture_source(live)
        fork = live.do(live.engine.forks.create(snapshot.id, ForkSpec()))
        assert live.shell(fork.id, "sha256sum /dev/shm/blob") == digest
        live.do(live.engine.sandboxes.delete(fork.id))


def test_capture_writes_only_changed_pages(live: Live, source: str, disable_live_captures: None) -> None:
    live.shell("source", "head -c 60000000 /dev/urandom >/dev/shm/blob")
    capture_source(live)
    written_byte_counts = []
    for _ in range(5):
        live.shell("source", "head -c 5000000 /dev/urandom | dd of=/dev/shm/blob conv=notrunc bs=64k 2>&1")
        written_byte_counts.append(capture_source(live).memory_bytes_written)
    # In some rounds, the guest itself changes about 5 MB more, for example when it reads programs for the first time.
    assert (
        min(written_byte_counts) > 5_000_000
        and statistics.median(written_byte_counts) < 12_000_000
        and max(written_byte_counts) < 30_000_000
    ), written_byte_counts


InjectFailure = Callable[[pytest.MonkeyPatch], None]


def make_writes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.copying._write_all", fail)


def make_device_save_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise BackendFailed("no device state")

    monkeypatch.setattr(Machine, "save_devices", fail)


def make_completion_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(WriteTracking, "complete", fail)


@pytest.mark.parametrize("inject_failure", [make_writes_fail, make_device_save_fail, make_completion_fail])
def test_capture_after_a_failed_capture_is_complete(
    live: Live, source: str, recorder: MemoryRecorder, disable_live_captures: None, inject_failure: InjectFailure
) -> None:
    start_writer(live)
    capture_source(live)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            inject_failure(patch)
            with pytest.raises(GatewayError):
                capture_source(live)
    snapshot = capture_source(live)
    assert snapshot.memory is MemoryMode.WRITTEN
    assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []


def get_machine_directory(live: Live) -> Path:
    sandbox = live.get_sandbox("source")
    return live.config.host.state_root / "sandboxes" / sandbox.id / sandbox.instance


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
    live: Live,
    source: str,
    recorder: MemoryRecorder,
    damage: Callable[[Path], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    start_writer(live)
    capture_source(live)
    damage(get_machine_directory(live) / "memory.last")
    snapshot = capture_source(live)
    assert reason in snapshot.host["degraded"]
    assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []
    next_snapshot = capture_source(live)
    assert (next_snapshot.memory, "degraded" in next_snapshot.host) == (MemoryMode.WRITTEN, False)
    assert recorder.find_differing_pages(get_memory_image_path(live, next_snapshot)) == []


@pytest.mark.parametrize("live", mark_slow_except(("written",), ("written", "compare")), indirect=True)
def test_a_capture_after_a_new_boot_does_not_use_the_previous_image(
    live: Live, source: str, recorder: MemoryRecorder
) -> None:
    capture_source(live)
    live.do(live.engine.machines.mark_stopped(live.get_sandbox("source"), "the test stopped it"))
    live.do(live.engine.sandboxes.resume("source"))
    snapshot = capture_source(live)
    assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []


def test_tracked_writes_are_ignored_after_an_interrupted_capture(
    kvm_xfs_world: KvmXfsWorld, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MAX_SINGLE_STOP_BYTES", 1 << 40)
    config = kvm_xfs_world.make_config()
    live = Live(kvm_xfs_world.make_host(config), config)
    live.do(live.engine.forks.create(TEMPLATE, ForkSpec(names=["source"])))
    start_writer(live)
    capture_source(live)
    with pytest.MonkeyPatch.context() as patch:
        make_writes_fail(patch)
        with pytest.raises(GatewayError):
            capture_source(live)
    live.close()
    live = Live(kvm_xfs_world.make_host(config), config)
    first_snapshot, second_snapshot = capture_source(live), capture_source(live)
    assert (first_snapshot.memory, first_snapshot.host["degraded"]) == (
        MemoryMode.COMPARE,
        "an earlier capture was interrupted",
    )
    assert (second_snapshot.memory, "degraded" in second_snapshot.host) == (MemoryMode.WRITTEN, False)
    assert recorder.find_differing_pages(get_memory_image_path(live, second_snapshot)) == []
    live.remove_all()
    live.close()
    kvm_xfs_world.clean_up(config)


def test_capture_without_a_tracker_uses_the_next_best_mode(
    live: Live, source: str, recorder: MemoryRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(1, "the page tracker failed: Operation not permitted")

    monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.tracker_client.TrackerClient.track", fail)
    capture_source(live)
    snapshot = capture_source(live)
    assert snapshot.memory in (MemoryMode.SOFT_DIRTY, MemoryMode.COMPARE)
    assert "not permitted" in snapshot.host["degraded"]
    assert recorder.find_differing_pages(get_memory_image_path(live, snapshot)) == []
