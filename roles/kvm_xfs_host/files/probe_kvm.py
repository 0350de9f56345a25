"""Test whether a guest boots on /dev/kvm: print ``{"accelerator": "kvm"|"tcg", "reason": sentence}``.

Opening the device is not enough: on some hypervisors it opens, but no stock kernel boots. Therefore this program boots
a stock kernel until the kernel looks for its root file system, which does not exist, or until a deadline. The program
uses only the standard library and leaves no files behind.
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
BOOTED = (b"Kernel panic", b"VFS: Cannot open root device", b"Run /")
BEGUN = b"Linux version"
SILENT_SECONDS = 8.0  # A booting kernel prints constantly: after this time without output, it counts as hung.


def main():
    parser = argparse.ArgumentParser(description="Test whether a guest boots on /dev/kvm.")
    parser.add_argument("--qemu", default="qemu-system-x86_64")
    parser.add_argument("--machine", default="q35")
    parser.add_argument("--accelerator", default="kvm", help="accelerator to test instead of KVM")
    parser.add_argument("--seconds", type=float, default=20, help="time limit for the boot")
    parser.add_argument("--kernel", type=Path, help="kernel to boot; default: the host's, else Debian's cloud kernel")
    arguments = parser.parse_args()
    accelerator, reason = decide(arguments)
    json.dump({"accelerator": accelerator, "reason": reason}, sys.stdout)
    print()


def decide(arguments):
    if arguments.accelerator == "kvm":
        if not KVM.exists():
            return "tcg", f"this host has no {KVM}"
        try:
            os.close(os.open(str(KVM), os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return "tcg", f"{KVM} cannot be opened: {error.strerror}"
    with tempfile.TemporaryDirectory(prefix="kvm-probe-") as directory:
        kernel = arguments.kernel or newest(Path("/boot")) or download(Path(directory))
        if not kernel:
            return "tcg", f"there is no kernel to test {KVM} with, neither in /boot nor in the package archive"
        return boot(arguments, kernel)


def newest(directory):
    """Return the newest readable kernel in ``directory``, or None."""
    readable = [path for path in directory.glob("vmlinuz-*") if os.access(str(path), os.R_OK)]
    return max(readable, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)], default=None)


def download(directory):
    """Return Debian's cloud kernel, unpacked below ``directory`` without installing it; None if it is not available."""
    try:
        shown = run(["apt-cache", "depends", "--important", "linux-image-cloud-amd64"], directory)
        package = re.findall(r"Depends: (linux-image-\S+)", shown)[0]
        run(["apt-get", "download", "-q", package], directory)
        run(["dpkg-deb", "--extract", str(next(directory.glob("*.deb"))), str(directory)], directory)
    except (OSError, subprocess.SubprocessError, IndexError, StopIteration):
        return None
    return newest(directory / "boot")


def run(argv, directory):
    """Return the standard output of a command. Raises an exception if it fails or takes more than five minutes."""
    done = subprocess.run(
        argv, cwd=str(directory), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=True
    )
    return done.stdout.decode(errors="replace")


def boot(arguments, kernel):
    argv = [arguments.qemu, "-M", arguments.machine, "-accel", arguments.accelerator, "-m", "256"]
    argv += ["-cpu", "host" if arguments.accelerator == "kvm" else "max"]
    argv += ["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot", "-serial", "stdio"]
    argv += ["-kernel", str(kernel), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return "tcg", f"{arguments.qemu} cannot be started: {error.strerror}"
    try:
        said, ended = listen(process, arguments.seconds)
    finally:
        process.kill()
        process.wait()
    if any(mark in said for mark in BOOTED):
        return arguments.accelerator, f"{kernel.name} booted on {arguments.accelerator}"
    if BEGUN in said:
        return "tcg", f"{KVM} opens, but a guest kernel on it stopped after its first lines"
    last = said.decode(errors="replace").strip().splitlines()[-1:] or [""]
    readable = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^ -~]", "", last[0])[:200] or "nothing"
    how = "QEMU ended" if ended else "there was no further output in time"
    return "tcg", f"{KVM} opens, but no guest kernel started on it ({how}); last output: {readable}"


def listen(process, seconds):
    """Return (console output, whether QEMU ended), read until the guest is up or hangs, QEMU ends, or time runs out."""
    said = b""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not any(mark in said for mark in BOOTED):
            if not selector.select(min(SILENT_SECONDS, max(0.0, deadline - time.monotonic()))):
                return said, False
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return said, True
            said += piece
    return said, False


if __name__ == "__main__":
    main()
