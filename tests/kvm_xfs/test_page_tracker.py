"""Test that the page tracker tracks the writes of a process that does not cooperate, and does not disturb it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.memory import listing
from sandbox_gateway.hosts.kvm_xfs.memory import tracker as tracker_module
from sandbox_gateway.hosts.kvm_xfs.memory.ram import PAGE_BYTES, Ram
from sandbox_gateway.hosts.kvm_xfs.memory.tracker_client import TrackerClient
from tests.kvm_xfs.test_memory import list_page_numbers

PAGE_COUNT = 512
_PROGRAM = """
import mmap, select, signal, sys, threading, time
ticks = 0
def count(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, count)
with open(sys.argv[1], "rb") as image:
    memory = mmap.mmap(image.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
def spin():
    while True:
        select.select([], [], [], 0.0001)
threading.Thread(target=spin, daemon=True).start()
if sys.argv[2] == "alarms":
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
print("ready", flush=True)
for line in sys.stdin:
    for page in map(int, line.split()):
        memory[page * 4096] = (memory[page * 4096] + 1) % 256
    print(ticks, flush=True)
"""


class Program:
    """A process that is named like QEMU. It maps an image, and writes to the pages listed on its standard input."""

    def __init__(self, directory: Path, mode: str) -> None:
        program_path = directory / "qemu-system-test"
        shutil.copy(Path(sys.executable).resolve(), program_path)
        self.image = directory / "image"
        self.image.write_bytes(bytes(PAGE_COUNT * PAGE_BYTES))
        self.process = subprocess.Popen(
            [program_path, "-c", textwrap.dedent(_PROGRAM), self.image, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONHOME": sys.base_prefix},
        )
        assert self._read_line() == "ready"

    @property
    def ram(self) -> Ram:
        return Ram(self.process.pid, self.image)

    def write(self, *page_numbers: int) -> int:
        """Make the process write to pages, and return how many alarm signals it has received so far."""
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, page_numbers)) + "\n")
        self.process.stdin.flush()
        return int(self._read_line())

    def _read_line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(tmp_path, getattr(request, "param", "quiet"))
    yield program
    program.kill()


@pytest.fixture
def tracker(requires_root: None) -> Iterator[TrackerClient]:
    client = TrackerClient()
    client.open()
    yield client
    client.close()


@pytest.mark.parametrize("program", ["quiet", "alarms"], indirect=True)
def test_tracker_lists_exactly_the_written_pages(program: Program, tracker: TrackerClient) -> None:
    program.write(1, 2, 3)
    ram = program.ram
    assert not listing.is_tracked(ram)
    tracker.track(ram.pid, ram.areas)
    assert listing.is_tracked(ram)
    program.write(7)
    assert list_page_numbers(ram, listing.list_written_pages(ram, take_marks=True)) == {1, 2, 3, 7}
    assert list_page_numbers(ram, listing.list_written_pages(ram, take_marks=True)) == set()
    program.write(2, 9)
    assert list_page_numbers(ram, listing.list_written_pages(ram, take_marks=False)) == {2, 9}
    assert list_page_numbers(ram, listing.list_written_pages(ram, take_marks=True)) == {2, 9}
    assert list_page_numbers(ram, listing.list_anonymous_pages(ram)) == {1, 2, 3, 7, 9}


@pytest.mark.parametrize("program", ["alarms"], indirect=True)
def test_tracking_preserves_the_signals_and_the_state_of_the_process(program: Program, tracker: TrackerClient) -> None:
    alarm_count_before = program.write()
    for _ in range(50):
        tracker.track(program.process.pid, [])
    assert program.write() > alarm_count_before
    assert program.process.poll() is None


def test_tracker_needs_no_file(
    program: Program, requires_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed gateway would leave the file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files_before = set(tmp_path.iterdir())
    client = TrackerClient()
    client.open()
    try:
        assert set(tmp_path.iterdir()) == files_before
        client.track(program.ram.pid, program.ram.areas)
        assert listing.is_tracked(program.ram)
    finally:
        client.close()


def test_tracking_outlives_the_tracker(program: Program) -> None:
    client = TrackerClient()
    client.open()
    ram = program.ram
    client.track(ram.pid, ram.areas)
    client.close()
    program.write(5)
    assert list_page_numbers(ram, listing.list_written_pages(ram, take_marks=True)) == {5}


def test_tracker_refuses_other_programs(tracker: TrackerClient) -> None:
    with subprocess.Popen(["sleep", "60"]) as other_process:
        try:
            with pytest.raises(OSError, match=r"runs sleep, not QEMU"):
                tracker.track(other_process.pid, [])
        finally:
            other_process.send_signal(signal.SIGKILL)


def test_tracker_refuses_other_users(requires_root: None) -> None:
    os.seteuid(65534)
    try:
        connections = socket.socketpair()
    finally:
        os.seteuid(0)
    with (
        connections[0],
        connections[1],
        pytest.raises(PermissionError, match="user 65534 may not use the page tracker"),
    ):
        tracker_module._check_peer(connections[0])


def test_tracking_an_exited_process_fails(tracker: TrackerClient) -> None:
    with pytest.raises(OSError, match="the page tracker failed"):
        tracker.track(2**22 + 1, [])


def test_tracking_unmapped_pages_fails_and_leaves_the_process_intact(program: Program, tracker: TrackerClient) -> None:
    area = program.ram.areas[0]
    unmapped_area = type(area)(area.end + (1 << 40), area.end + (1 << 40) + PAGE_BYTES, 0)
    with pytest.raises(OSError, match="the page tracker failed"):
        tracker.track(program.process.pid, [unmapped_area])
    program.write(3)


@pytest.mark.parametrize("request_line", [b"", b"{}\n", b"[]\n", b'{"pid": "x", "areas": []}\n', b"x" * 70_000 + b"\n"])
def test_tracker_answers_malformed_requests_with_an_error(
    program: Program, tracker: TrackerClient, request_line: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tracker._path))
        connection.sendall(request_line)
        connection.shutdown(socket.SHUT_WR)
        response = connection.makefile("rb").readline()
    assert "error" in json.loads(response)
    tracker.track(program.process.pid, program.ram.areas)
