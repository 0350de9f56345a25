"""Test whether a guest boots on /dev/kvm, and print ``{"accelerator": "kvm"|"tcg", "reason": sentence}``.

Opening the device is not enough: on some hypervisors it opens, but no stock kernel boots. Therefore this program boots
a stock kernel until the kernel looks for its root file system, which does not exist, or until a time limit. The program
uses only the standard library and removes all its files.
"""

import argparse
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KVM = Path("/dev/kvm")
BOOT_MARKERS = (b"Kernel panic", b"VFS: Cannot open root device", b"Run /")
KERNEL_START_MARKER = b"Linux version"
MAX_SILENT_SECONDS = 8.0  # A kernel that prints nothing for this long is considered hung.


def main():
    parser = argparse.ArgumentParser(description="Test whether a guest boots on /dev/kvm.")
    parser.add_argument("--qemu", default="qemu-system-x86_64")
    parser.add_argument("--machine", default="q35")
    parser.add_argument("--accelerator", default="kvm", help="accelerator to test instead of KVM")
    parser.add_argument("--seconds", type=float, default=20, help="time limit for the boot")
    parser.add_argument("--kernel", type=Path, help="kernel to boot; default: the host's, else Debian's cloud kernel")
    arguments = parser.parse_args()
    accelerator, reason = choose_accelerator(arguments)
    json.dump({"accelerator": accelerator, "reason": reason}, sys.stdout)
    print()


def choose_accelerator(arguments):
    if arguments.accelerator == "kvm":
        if not KVM.exists():
            return "tcg", f"this host has no {KVM}"
        try:
            os.close(os.open(str(KVM), os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return "tcg", f"{KVM} cannot be opened: {error.strerror}"
    with tempfile.TemporaryDirectory(prefix="kvm-probe-") as directory:
        kernel = arguments.kernel or find_newest_kernel(Path("/boot")) or download_kernel(Path(directory))
        if not kernel:
            return "tcg", f"there is no kernel to test {KVM} with, neither in /boot nor in the package archive"
        return boot_guest(arguments, kernel)


def find_newest_kernel(directory):
    """Return the newest readable kernel in ``directory``, or None."""
    readable_paths = [path for path in directory.glob("vmlinuz-*") if os.access(str(path), os.R_OK)]
    return max(readable_paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def download_kernel(directory):
    """Download Debian's cloud kernel and unpack it under ``directory``. Returns its path, or None on failure."""
    try:
        dependencies = run_command(["apt-cache", "depends", "--important", "linux-image-cloud-amd64"], directory)
        package = re.findall(r"Depends: (linux-image-\S+)", dependencies)[0]
        run_command(["apt-get", "download", "-q", package], directory)
        run_command(["dpkg-deb", "--extract", str(next(directory.glob("*.deb"))), str(directory)], directory)
    except (OSError, subprocess.SubprocessError, IndexError, StopIteration):
        return None
    return find_newest_kernel(directory / "boot")


def run_command(argv, directory):
    """Run a command and return its standard output. Raises SubprocessError if it fails or exceeds five minutes."""
    result = subprocess.run(
        argv, cwd=str(directory), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=True
    )
    return result.stdout.decode(errors="replace")


def boot_guest(arguments, kernel):
    argv = [arguments.qemu, "-M", arguments.machine, "-accel", arguments.accelerator, "-m", "256"]
    argv += ["-cpu", "host" if arguments.accelerator == "kvm" else "max"]
    argv += ["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot", "-serial", "stdio"]
    argv += ["-kernel", str(kernel), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "tcg", f"{arguments.qemu} cannot be started: {error.strerror}"
    try:
        output, has_exited = read_console(process, arguments.seconds)
    finally:
        process.kill()
        process.wait()
    if any(mark in output for mark in BOOT_MARKERS):
        return arguments.accelerator, f"{kernel.name} booted on {arguments.accelerator}"
    if KERNEL_START_MARKER in output:
        return "tcg", f"{KVM} can be opened, but a guest kernel on it stopped after its first lines"
    last_lines = output.decode(errors="replace").strip().splitlines()[-1:] or [""]
    last_line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^ -~]", "", last_lines[0])[:200] or "nothing"
    cause = "QEMU exited" if has_exited else "no further output within the time limit"
    return "tcg", f"{KVM} can be opened, but no guest kernel started on it ({cause}); last output: {last_line}"


def read_console(process, seconds):
    """Read the console until the guest has booted or hangs, QEMU exits, or ``seconds`` have passed.

    Returns the output and whether QEMU exited.
    """
    output = b""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not any(mark in output for mark in BOOT_MARKERS):
            if not selector.select(min(MAX_SILENT_SECONDS, max(0.0, deadline - time.monotonic()))):
                return output, False
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                return output, True
            output += chunk
    return output, False


if __name__ == "__main__":
    main()
