"""Test that holds are released when a descriptor is closed, with /dev/null in place of /dev/zfs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from zfs_core import capabilities, hold_descriptors, lzc_hold, process
from zfs_core.capabilities import make_openzfs_capabilities
from zfs_core.exceptions import BadHoldCleanupFD, ZFSGenericError

_HOLDS = {"tank/a@s": "tag 1", "tank/b@s": "tag 2"}


@pytest.fixture
def command_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with the arguments of each `zfs` command that was run."""
    log, program = tmp_path / "log", tmp_path / "zfs"
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >>{log}\necho >>{log}\n')
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hold_descriptors, "_DEVICE", "/dev/null")
    monkeypatch.setattr(hold_descriptors, "_helpers", [])
    monkeypatch.setattr(capabilities, "_capabilities", make_openzfs_capabilities((2, 3)))
    yield log
    hold_descriptors.wait_for_releases()


def test_holds_are_released_when_the_last_duplicate_is_closed(command_log: Path) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    duplicate_fd = os.dup(fd)
    other_fd = os.open("/dev/null", os.O_RDONLY)
    hold_descriptors.validate_descriptor(fd)
    hold_descriptors.release_when_closed(fd, _HOLDS)
    hold_descriptors.release_when_closed(other_fd, {"tank/c@s": "tag 3"})
    os.close(fd)
    hold_descriptors.wait_for_releases()
    assert command_log.read_text() == "", "the holds were released while a duplicate was open"
    os.close(duplicate_fd)
    hold_descriptors.wait_for_releases()
    assert command_log.read_text() == "release|tag 1|tank/a@s|\nrelease|tag 2|tank/b@s|\n"
    os.close(other_fd)
    hold_descriptors.wait_for_releases()
    assert command_log.read_text().endswith("release|tag 3|tank/c@s|\n")
    assert not hold_descriptors._helpers


def test_holds_are_released_when_the_process_is_killed(command_log: Path) -> None:
    code = (
        "import os, sys, time\nfrom zfs_core import hold_descriptors\nhold_descriptors._DEVICE = '/dev/null'\n"
        "hold_descriptors.release_when_closed(os.open('/dev/null', os.O_RDONLY), {'tank/a@s': 't'})\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(hold_descriptors.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert command_log.read_text() == ""
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not command_log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert command_log.read_text() == "release|t|tank/a@s|\n"


def test_nothing_is_held_where_descriptors_cannot_be_watched(
    command_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    with Path("/dev/null").open() as file, pytest.raises(NotImplementedError, match="only on Linux"):
        lzc_hold({"tank/a@s": "t"}, file.fileno())
    assert command_log.read_text() == ""


@pytest.mark.parametrize("failing_word", ["tank/c@s", "helper"])
def test_holds_that_were_placed_are_released_if_a_later_step_fails(
    command_log: Path, monkeypatch: pytest.MonkeyPatch, failing_word: str
) -> None:
    """In the first case, the last `zfs hold` times out. In the second one, the waiting process cannot be started."""
    program = command_log.with_name("zfs")
    program.write_text(program.read_text() + f'case $* in "hold t {failing_word}") exec sleep 60 ;; esac\n')
    monkeypatch.setattr(process, "TIMEOUT_SECONDS", 0.3)
    if failing_word == "helper":
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    with Path("/dev/null").open() as file, pytest.raises(ZFSGenericError):
        lzc_hold(dict.fromkeys(("tank/a@s", "tank/b@s", "tank/c@s"), "t"), file.fileno())
    commands = command_log.read_text().splitlines()
    held_names = [line.split("|")[2] for line in commands if line.startswith("hold|")]
    released_names = [line.split("|")[2] for line in commands if line.startswith("release|")]
    assert held_names == ["tank/a@s", "tank/b@s", "tank/c@s"]
    assert released_names == [name for name in held_names if name != failing_word]


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH])
def test_a_descriptor_that_cannot_be_locked_is_refused_first(command_log: Path, flags: int) -> None:
    fd = os.open("/dev/null", flags)
    try:
        with pytest.raises(BadHoldCleanupFD):
            lzc_hold({"tank/a@s": "t"}, fd)
    finally:
        os.close(fd)
    assert command_log.read_text() == ""


def test_a_hung_release_delays_each_caller_once_but_no_other_release(
    command_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = command_log.with_name("zfs")
    program.write_text(program.read_text() + "case $3 in tank/a@s) exec sleep 60 ;; esac\n")
    monkeypatch.setattr(hold_descriptors, "_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(hold_descriptors, "_RELEASE_SECONDS", 1.5)
    fd = os.open("/dev/null", os.O_RDONLY)
    hold_descriptors.release_when_closed(fd, _HOLDS)
    os.close(fd)
    helper = hold_descriptors._helpers[0].process
    with ThreadPoolExecutor() as pool:
        calls = [pool.submit(hold_descriptors.wait_for_releases) for _ in range(3)]
        time.sleep(0.1)
        assert hold_descriptors._lock.acquire(timeout=0.3), "a caller waits while it holds the lock"
        hold_descriptors._lock.release()
        for call in calls:
            with pytest.raises(ZFSGenericError, match="Failed to release holds"):
                call.result(10)
    hold_descriptors.wait_for_releases()
    helper.wait(20)
    assert command_log.read_text() == "release|tag 1|tank/a@s|\nrelease|tag 2|tank/b@s|\n"


def test_only_descriptors_of_the_device_are_accepted(command_log: Path, tmp_path: Path) -> None:
    for path in ("/dev/zero", tmp_path / "log"):
        fd = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(BadHoldCleanupFD):
                hold_descriptors.validate_descriptor(fd)
        finally:
            os.close(fd)
    with pytest.raises(BadHoldCleanupFD):
        hold_descriptors.validate_descriptor(fd)
