#!/usr/bin/env python3
"""Say whether a guest really boots on /dev/kvm: ``{"accelerator": "kvm"|"tcg", "reason": sentence}`` on standard output.

That the device opens proves nothing: below another hypervisor it may open while no stock kernel gets past its boot
loader. So a stock kernel is booted, until it looks for its root file system (which it has none of), or a deadline.
Standard library only; leaves nothing behind.
"""

import argparse
import glob
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time

BOOTED = (b"Kernel panic", b"VFS: Cannot open root device", b"Run /")
BEGUN = b"Linux version"


def main():
    parser = argparse.ArgumentParser(description="Does a guest really boot on /dev/kvm?")
    parser.add_argument("--qemu", default="qemu-system-x86_64")
    parser.add_argument("--machine", default="q35")
    parser.add_argument("--seconds", type=float, default=20, help="deadline of the boot")
    parser.add_argument("--kernel", default="", help="kernel to boot; default: the host's, else Debian's cloud kernel")
    arguments = parser.parse_args()
    accelerator, reason = decide(arguments)
    json.dump({"accelerator": accelerator, "reason": reason}, sys.stdout)
    print()


def decide(arguments):
    if not os.path.exists("/dev/kvm"):
        return "tcg", "this host has no /dev/kvm"
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return "tcg", "/dev/kvm does not open: %s" % error.strerror
    with tempfile.TemporaryDirectory(prefix="kvm-probe-") as directory:
        kernel = arguments.kernel or newest(glob.glob("/boot/vmlinuz-*")) or download(directory)
        if not kernel:
            return "tcg", "no kernel to try /dev/kvm with: neither in /boot nor from the package archive"
        return boot(arguments, kernel)


def newest(paths):
    """The path whose version is highest; None if there is none that can be read."""
    readable = [path for path in paths if os.access(path, os.R_OK)]
    return max(readable, key=lambda path: [int(part) for part in re.findall(r"\d+", path)], default=None)


def download(directory):
    """Debian's cloud kernel, unpacked below ``directory`` and not installed; None if it cannot be had."""
    try:
        shown = run(["apt-cache", "depends", "--important", "linux-image-cloud-amd64"], directory)
        package = re.search(r"Depends: (linux-image-\S+)", shown).group(1)
        run(["apt-get", "download", "-q", package], directory)
        run(["dpkg-deb", "--extract", glob.glob(os.path.join(directory, "*.deb"))[0], directory], directory)
    except (OSError, subprocess.SubprocessError, AttributeError, IndexError):
        return None
    return newest(glob.glob(os.path.join(directory, "boot", "vmlinuz-*")))


def run(argv, directory):
    """Standard output of a command; raises when it fails or takes more than five minutes."""
    done = subprocess.run(
        argv, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=300, check=True
    )
    return done.stdout.decode(errors="replace")


def boot(arguments, kernel):
    argv = [arguments.qemu, "-M", arguments.machine, "-accel", "kvm", "-cpu", "host", "-m", "256"]
    argv += ["-display", "none", "-nodefaults", "-no-user-config", "-no-reboot", "-serial", "stdio"]
    argv += ["-kernel", kernel, "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        return "tcg", "%s does not start: %s" % (arguments.qemu, error.strerror)
    try:
        said, ended = listen(process, arguments.seconds)
    finally:
        process.kill()
        process.wait()
    if any(mark in said for mark in BOOTED):
        return "kvm", "%s booted on /dev/kvm" % os.path.basename(kernel)
    if BEGUN in said:
        return "tcg", "/dev/kvm opens, but a guest kernel on it came no further than its first lines"
    last = said.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return "tcg", "/dev/kvm opens, but no guest kernel started on it (%s); the last that was said: %s" % (
        "QEMU ended" if ended else "%g s were not enough" % arguments.seconds,
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[^ -~]", "", last[0])[:200] or "nothing",
    )


def listen(process, seconds):
    """What came on the serial console until the guest was up, QEMU ended or the time was over; and whether it ended."""
    said = b""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not any(mark in said for mark in BOOTED):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return said, False
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return said, True
            said += piece
    return said, False


if __name__ == "__main__":
    main()
