"""Root in a sandbox tries to fill the host's disk, then the gateway's memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.hosts.kvm_xfs.bounded_log import LOG_BYTES
from tests.support.gateway import Gateway
from tests.support.waiting import wait_until

PRINT_COUNT = 600_000
"""How many times QEMU prints a line of 51 bytes."""
MAX_GROWTH_BYTES = 15 << 20
"""The output is twice as large."""

# Write an invalid value to queue_enable, a register in the common configuration of virtio-pci: QEMU prints an error.
# The device is the serial port, so that disk and network still work.
ATTACK_SCRIPT = """
import glob, mmap, os, struct, sys
for device in glob.glob("/sys/bus/pci/devices/*"):
    config = open(device + "/config", "rb").read()
    if struct.unpack_from("<HH", config) not in ((0x1AF4, 0x1003), (0x1AF4, 0x1043)):
        continue
    at = config[0x34]
    while at:
        if config[at] == 9 and config[at + 3] == 1:
            bar, offset = config[at + 4], struct.unpack_from("<I", config, at + 8)[0]
        at = config[at + 1]
    # The kernel does not map registers of a device that has a driver.
    if os.path.exists(f"{device}/driver"):
        open(f"{device}/driver/unbind", "w").write(os.path.basename(device))
    open(f"{device}/enable", "w").write("1")
    file = os.open(f"{device}/resource{bar}", os.O_RDWR | os.O_SYNC)
    registers = memoryview(mmap.mmap(file, 0x4000)).cast("H")
    queue_enable = offset // 2 + 14
    for _ in range(int(sys.argv[1])):
        registers[queue_enable] = 3
"""


@pytest.fixture
def sandbox_id(shared_gateway: Gateway, template: str) -> Iterator[str]:
    new_sandbox = shared_gateway.call("POST", "/sandboxes", {"templateID": template, "timeout": 3600})
    yield str(new_sandbox["sandboxID"])
    shared_gateway.client.delete(f"/sandboxes/{new_sandbox['sandboxID']}")


def test_the_qemu_log_is_bounded(shared_gateway: Gateway, sandbox_id: str) -> None:
    """Root makes QEMU print 30 MB. The log stays within its limit, and the machine keeps running.

    When the machine stops, the gateway needs little memory to report why.
    """
    pid = find_qemu_pid(shared_gateway, sandbox_id)
    result = shared_gateway.execute(sandbox_id, "python3", "-c", ATTACK_SCRIPT, str(PRINT_COUNT), timeout=240)
    assert result["exitCode"] == 0, result
    output = b"".join(Path(f"/proc/{pid}/fd/{stream}").read_bytes()[:LOG_BYTES] for stream in (1, 2))
    assert b"queue_enable" in output, "this QEMU prints nothing there: find another register"
    assert [Path(f"/proc/{pid}/fd/{stream}").stat().st_size <= LOG_BYTES for stream in (1, 2)] == [True, True]
    assert shared_gateway.sh(sandbox_id, "echo alive") == "alive\n"
    memory_before = measure_gateway_memory(shared_gateway)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: get_sandbox(shared_gateway, sandbox_id)["state"] == "paused")
    reason = get_sandbox(shared_gateway, sandbox_id)["stateReason"]
    assert "queue_enable" in reason and len(reason) < 1000
    assert measure_gateway_memory(shared_gateway) - memory_before < MAX_GROWTH_BYTES


def test_a_restarted_gateway_reads_the_log(shared_gateway: Gateway, sandbox_id: str) -> None:
    """The log is an in-memory file. A restarted gateway finds it through the QEMU process, which keeps it open."""
    assert shared_gateway.execute(sandbox_id, "python3", "-c", ATTACK_SCRIPT, "1", timeout=60)["exitCode"] == 0
    shared_gateway.restart()
    os.kill(find_qemu_pid(shared_gateway, sandbox_id), signal.SIGKILL)
    wait_until(lambda: get_sandbox(shared_gateway, sandbox_id)["state"] == "paused")
    assert "queue_enable" in get_sandbox(shared_gateway, sandbox_id)["stateReason"]


@pytest.mark.slow
def test_the_copy_of_the_console_is_bounded(shared_gateway: Gateway, sandbox_id: str) -> None:
    """QEMU keeps a copy of the console of a machine that boots. Root writes twice its limit."""
    shared_gateway.call("POST", f"/sandboxes/{sandbox_id}/pause", {"memory": False})
    shared_gateway.call("POST", f"/sandboxes/{sandbox_id}/resume")
    pid = find_qemu_pid(shared_gateway, sandbox_id)
    sizes_before = measure_files(pid)
    flood = f"yes flood | head -c {2 * LOG_BYTES} > /dev/ttyS0"
    assert shared_gateway.execute(sandbox_id, "sh", "-c", flood, timeout=240)["exitCode"] == 0
    assert measure_files(pid) == sizes_before
    logs = [path for path in Path(f"/proc/{pid}/fd").iterdir() if str(path.readlink()).startswith("/memfd:log ")]
    assert logs and {path.stat().st_size for path in logs} == {LOG_BYTES}
    assert any(b"flood" in path.read_bytes() for path in logs), "QEMU keeps no copy of the console"
    assert shared_gateway.sh(sandbox_id, "echo alive") == "alive\n"


def measure_files(pid: int) -> dict[str, int]:
    """Return the sizes of the regular files that a process has opened."""
    return {str(path): path.stat().st_size for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_file()}


def test_a_log_file_of_an_older_release_is_truncated(shared_gateway: Gateway, sandbox_id: str) -> None:
    """A machine started by an older release appends to a log file on disk. This test writes to the file instead."""
    path = find_instance_directory(shared_gateway, sandbox_id) / "run" / "qemu.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"printed\n")
        shared_gateway.restart()
        assert path.read_bytes() == b"printed\n"
        for _ in range(2):
            log.write(b"x" * (LOG_BYTES + 1))
            wait_until(lambda: path.stat().st_size == 0)
    assert shared_gateway.sh(sandbox_id, "echo alive") == "alive\n"


def find_instance_directory(gateway: Gateway, sandbox_id: str) -> Path:
    """Return the directory of a sandbox's machine."""
    (directory,) = (each for each in (gateway.state_root / "sandboxes" / sandbox_id).iterdir() if each.is_dir())
    return directory


def find_qemu_pid(gateway: Gateway, sandbox_id: str) -> int:
    """Return the pid of a sandbox's QEMU process."""
    directory_prefix = f"{gateway.state_root}/sandboxes/{sandbox_id}/"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                directory_prefix in (command := (entry / "cmdline").read_text())
                and command.partition("\0")[0].find("qemu") >= 0
            ):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"sandbox {sandbox_id} has no QEMU process")


def get_sandbox(gateway: Gateway, sandbox_id: str) -> Any:
    return next(each for each in gateway.call("GET", "/sandboxes?limit=1000") if each["sandboxID"] == sandbox_id)


def measure_gateway_memory(gateway: Gateway) -> int:
    """Return the memory use of the gateway in bytes."""
    assert gateway.process is not None
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
