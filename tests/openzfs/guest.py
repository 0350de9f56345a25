"""Run the steps of a job inside the guest, as its first process, and turn the guest off.

This program uses only the standard library. The disks are: ubda, the image; ubdb, the job; ubdc, the virtual
environment of Python; ubdd, a tar archive of the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import termios
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

JOB = Path("/job")
RESULTS = Path("/results")
MARKER = "openzfs-guest:"
"""Lines that start with this word report the beginning and the end of steps to the host."""
TIMED_OUT = 124


def main() -> None:
    if os.getpid() != 1:
        sys.exit("this program kills all processes and reboots: it only runs as the first process of the guest")
    try:
        _set_up_system()
        _run_job(json.loads((JOB / "job.json").read_text()))
    except BaseException:
        traceback.print_exc()
    finally:
        _turn_off()


def _turn_off() -> None:
    print(f"{MARKER} off", flush=True)
    os.sync()
    with contextlib.suppress(termios.error):
        termios.tcdrain(1)
    # The host starts the kernel with the argument noreboot, so that it exits.
    Path("/proc/sysrq-trigger").write_text("b")


def _set_up_system() -> None:
    for directory in ("/dev/pts", "/dev/shm", "/run/lock", "/run/netns"):
        Path(directory).mkdir(exist_ok=True)
    if not os.path.ismount("/dev/pts"):
        _call("mount", "-t", "devpts", "-o", "gid=5,mode=620,ptmxmode=666", "devpts", "/dev/pts")
    _call("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    # The doubles of FreeBSD's commands use version 1 of control groups.
    _call("mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
    for controller in ("cpu", "memory", "pids"):
        directory = Path("/sys/fs/cgroup") / controller
        directory.mkdir()
        _call("mount", "-t", "cgroup", "-o", controller, controller, str(directory))
    _call("hostname", "openzfs")
    _call("ip", "link", "set", "lo", "up")


def _run_job(job: dict[str, Any]) -> None:
    repository = Path(job["repository"])
    RESULTS.mkdir(exist_ok=True)
    repository.mkdir(parents=True, exist_ok=True)
    _call("mount", "--bind", str(JOB / "repository"), str(repository))
    (repository / ".venv").mkdir()
    _call("mount", "-t", "ext4", "-o", "ro", "/dev/ubdc", str(repository / ".venv"))
    cache = Path(job["state"]) / "cache"
    cache.mkdir(parents=True)
    _call("mount", "--bind", str(JOB / "cache"), str(cache))
    # The tests look for the root file system of the jails under a name that depends on the sources.
    sources = Path("/etc/apt/sources.list.d/host.sources")
    for path in [Path("/etc/apt/sources.list"), *sources.parent.iterdir()]:
        path.unlink(missing_ok=True)
    sources.write_text(job["apt_sources"])
    environment = {**os.environ, **job["environment"]}
    for step in job["steps"]:
        print(f"{MARKER} start {step['name']}", flush=True)
        start_time = time.monotonic()
        status = _run_step(step["argv"], step["seconds"], repository, environment)
        print(f"{MARKER} end {step['name']} {status} {time.monotonic() - start_time:.0f}", flush=True)
    with tarfile.open("/dev/ubdd", "w") as archive:
        archive.add(RESULTS, arcname=".")


def _run_step(argv: list[str], seconds: float, directory: Path, environment: dict[str, str]) -> int:
    """Run a step, end all processes that it leaves behind, and return its exit status, or 124 after a timeout."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env=environment,
        start_new_session=True,
    )
    # Programs write plain lines to a pipe, but redraw their progress on a terminal.
    printer = threading.Thread(target=_print_lines, args=(process.stdout,))
    printer.start()
    deadline = time.monotonic() + seconds
    status = _wait(process.pid, deadline)
    # This reaches every process except the first one.
    os.kill(-1, signal.SIGKILL)
    _wait(None, time.monotonic() + 30)
    printer.join(30)
    return TIMED_OUT if status is None else status


def _print_lines(lines: IO[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def _wait(pid: int | None, deadline: float) -> int | None:
    """Wait for a process, or for all, and reap orphans that exit in the meantime. Returns the process's exit status."""
    while time.monotonic() < deadline:
        try:
            ended_pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended_pid == 0:
            time.sleep(0.05)
        elif ended_pid == pid:
            return os.waitstatus_to_exitcode(status)
    return None


def _call(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=60)


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.chdir("/")
    main()
