"""Run the shim's commands for a test, in a network namespace with a separate state directory and jail root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SHIM_DIRECTORY = Path(__file__).parent
BIN_DIRECTORY = SHIM_DIRECTORY / "bin"
REQUIRED_PROGRAMS = ["/usr/bin/nsenter", "/usr/bin/unshare", "/usr/bin/python3", "/usr/sbin/nft"]


@dataclass
class Shim:
    """A shim with a separate state directory and jail root, whose commands run in a separate network namespace."""

    state: Path
    root: Path
    namespace_pid: int
    environ: dict[str, str]

    def __call__(
        self, *words: str, input: str | None = None, timeout: float = 30, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return its result, even if it fails."""
        command = ["/usr/bin/nsenter", f"--net=/proc/{self.namespace_pid}/ns/net", *words]
        env = {**self.environ, **environ}
        return subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, env=env)

    def check_ok(self, *words: str, input: str | None = None, **environ: str) -> str:
        """Run a command that must succeed without printing to standard error. Returns its standard output."""
        result = self(*words, input=input, **environ)
        assert (result.returncode, result.stderr) == (0, ""), (words, result)
        return result.stdout

    def expect_failure(self, code: int, stderr: str, *words: str, input: str | None = None, **environ: str) -> None:
        """Run a command that must exit with ``code``, print exactly ``stderr``, and leave standard output empty."""
        result = self(*words, input=input, **environ)
        assert (result.returncode, result.stderr.rstrip("\n"), result.stdout) == (code, stderr, ""), result

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["/usr/bin/nsenter", f"--net=/proc/{self.namespace_pid}/ns/net", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environ)

    def create_jail(self, name: str = "sx1", *params: str) -> str:
        """Create a jail with the usual parameters and ``params``. Returns the jid."""
        words = ["jail", "-i", "-c", f"name={name}", f"path={self.root}", "persist", "vnet=new"]
        words += [f"host.hostname={name}-host", "mount.devfs", "devfs_ruleset=4", "enforce_statfs=2", "securelevel=2"]
        words += ["children.max=0", "allow.noset_hostname", "allow.noraw_sockets", "stop.timeout=10", *params]
        return self.check_ok(*words).strip()


def is_supported() -> bool:
    """Return whether the shim can run on this machine."""
    return os.geteuid() == 0 and all(os.access(path, os.X_OK) for path in REQUIRED_PROGRAMS)


@contextmanager
def created_shim(directory: Path) -> Iterator[Shim]:
    """Create a shim with its files in ``directory``, and at the end remove everything that it created.

    The shim has its own network namespace, so it does not change the machine's network.
    """
    holder = subprocess.Popen(["/usr/bin/unshare", "-n", "sleep", "infinity"])
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert holder.poll() is None
    environ = {"PATH": f"{BIN_DIRECTORY}:/usr/sbin:/usr/bin:/sbin:/bin", "FREEBSD_SHIM_STATE": str(directory / "state")}
    shim = Shim(directory / "state", directory / "root", holder.pid, environ)
    for name in ("usr", "dev", "etc", "tmp", "root", "vol"):
        (shim.root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (shim.root / name).symlink_to(f"usr/{name}")
    (shim.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nguest:x:1234:1234::/tmp:/bin/sh\n")
    try:
        shim.check_ok("mount", "-t", "nullfs", "-o", "ro,nosuid", "/usr", str(shim.root / "usr"))
        yield shim
    finally:
        shim("freebsd-shim", "purge")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        leftovers = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(shim.root) in line]
        cgroup_name = str(shim.state).strip("/").replace("/", "-")
        leftovers += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/freebsd_shim/{cgroup_name}")]
        assert not leftovers
