#!/opt/sandbox/bin/python3 -ISB
"""The first process of a sandbox whose template was built from an image.

Mounts the kernel's file systems, sets up the network, keeps the agent running, and waits for orphaned processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import time

PREFIX = "/opt/sandbox"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = {"PATH": f"{PREFIX}/bin:{SYSTEM_PATH}"}
AGENT = [f"{PREFIX}/bin/python3", "-I", "-S", "-B", "/opt/sandbox_agent"]
FILE_SYSTEMS = [
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("devtmpfs", "/dev", "mode=755"),
    ("devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666"),
    ("tmpfs", "/dev/shm", "mode=1777"),
    ("tmpfs", "/run", "mode=755,size=20%"),
    ("cgroup2", "/sys/fs/cgroup", ""),
]
LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
MODULES = ["virtio_net", "virtio_console", "virtio_rng", "vmgenid"]
PORTS = "/sys/class/virtio-ports"
PORT_SECONDS = 5.0
OPEN_FILES = (16384, 524288)
POWER_OFF = 0x4321FEDC
OFF_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPWR)

libc = ctypes.CDLL(None, use_errno=True)


def mount_file_systems() -> None:
    for kind, path, options in FILE_SYSTEMS:
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)
        # The initrd has already mounted some of them.
        if not os.path.ismount(path) and libc.mount(kind.encode(), path.encode(), kind.encode(), 0, options.encode()):
            print(f"init: cannot mount {path}: {os.strerror(ctypes.get_errno())}", flush=True)
    for name, target in LINKS.items():
        if not os.path.lexists(f"/dev/{name}"):
            os.symlink(target, f"/dev/{name}")


def load_modules() -> None:
    with open("/proc/sys/kernel/modprobe", "w") as file:
        file.write(f"{PREFIX}/bin/modprobe")
    run([f"{PREFIX}/bin/modprobe", "-q", "-a", *MODULES])


def name_ports() -> None:
    """Create the links to the serial ports that udev would create. The agent opens its port by its name."""
    deadline = time.monotonic() + PORT_SECONDS
    os.makedirs("/dev/virtio-ports", exist_ok=True)
    while time.monotonic() < deadline:
        for port in os.listdir(PORTS) if os.path.isdir(PORTS) else []:
            with open(f"{PORTS}/{port}/name") as file:
                name = file.read().strip()
            if name and "/" not in name:
                os.symlink(f"../{port}", f"/dev/virtio-ports/{name}")
                return
        time.sleep(0.05)


def run(argv: list[str]) -> None:
    try:
        subprocess.run(argv, env=TOOLS, stdin=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"init: {argv[0]} failed: {error}", flush=True)


def build_agent_environment() -> dict[str, str]:
    """Return the agent's environment. It has the image's PATH, so that commands find the image's programs."""
    try:
        with open(f"{PREFIX}/start.json") as file:
            path = json.load(file)["env"].get("PATH")
    except (OSError, ValueError, KeyError):
        path = None
    return {"PATH": path or SYSTEM_PATH, "LANG": "C.UTF-8"}


def start_agent() -> int:
    return subprocess.Popen(
        AGENT, env=build_agent_environment(), stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
    ).pid


def power_off(number: int, frame: object) -> None:
    os.sync()
    libc.reboot(POWER_OFF)


def main() -> None:
    for number in OFF_SIGNALS:
        signal.signal(number, power_off)
    resource.setrlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
    mount_file_systems()
    load_modules()
    run(["/bin/sh", "/usr/local/lib/sandbox/network"])
    name_ports()
    agent = start_agent()
    while True:
        try:
            pid, _ = os.waitpid(-1, 0)
        except ChildProcessError:
            pid = agent
        if pid == agent:
            time.sleep(0.2)
            agent = start_agent()


main()
