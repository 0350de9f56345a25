"""FreeBSD's commands for a test: in a network namespace, with a separate state directory and jail root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BIN = HERE / "bin"
NEEDED = ["/usr/bin/nsenter", "/usr/bin/unshare", "/usr/bin/python3", "/usr/sbin/nft"]


@dataclass
class Shim:
    """FreeBSD's commands in their own network namespace."""

    state: Path
    root: Path
    space: int
    environ: dict[str, str]

    def __call__(
        self, *words: str, input: str | None = None, timeout: float = 30, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``words``; never raises."""
        command = ["/usr/bin/nsenter", f"--net=/proc/{self.space}/ns/net", *words]
        env = {**self.environ, **environ}
        return subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout, env=env)

    def check_ok(self, *words: str, input: str | None = None, **environ: str) -> str:
        """Run ``words``, which must succeed with empty standard error; returns the output."""
        done = self(*words, input=input, **environ)
        assert (done.returncode, done.stderr) == (0, ""), (words, done)
        return done.stdout

    def check_fails(self, code: int, stderr: str, *words: str, input: str | None = None, **environ: str) -> None:
        """Run ``words``, which must exit with ``code`` and print exactly ``stderr``, and nothing to stdout."""
        done = self(*words, input=input, **environ)
        assert (done.returncode, done.stderr.rstrip("\n"), done.stdout) == (code, stderr, ""), done

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = ["/usr/bin/nsenter", f"--net=/proc/{self.space}/ns/net", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environ)

    def create_jail(self, name: str = "sx1", *more: str) -> str:
        """Create a jail as on the contract page; returns the jid."""
        words = ["jail", "-i", "-c", f"name={name}", f"path={self.root}", "persist", "vnet=new"]
        words += [f"host.hostname={name}-host", "mount.devfs", "devfs_ruleset=4", "enforce_statfs=2", "securelevel=2"]
        words += ["children.max=0", "allow.noset_hostname", "allow.noraw_sockets", "stop.timeout=10", *more]
        return self.check_ok(*words).strip()


def is_supported() -> bool:
    """Whether the shim can run here."""
    return os.geteuid() == 0 and all(os.access(path, os.X_OK) for path in NEEDED)


@contextmanager
def shim_in(where: Path) -> Iterator[Shim]:
    """A shim with everything below ``where``; it leaves the machine's own network alone, and everything is restored."""
    holder = subprocess.Popen(["/usr/bin/unshare", "-n", "sleep", "infinity"])
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert holder.poll() is None
    environ = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "FREEBSD_SHIM_STATE": str(where / "state")}
    made = Shim(where / "state", where / "root", holder.pid, environ)
    for name in ("usr", "dev", "etc", "tmp", "root", "vol"):
        (made.root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (made.root / name).symlink_to(f"usr/{name}")
    (made.root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nguest:x:1234:1234::/tmp:/bin/sh\n")
    try:
        made.check_ok("mount", "-t", "nullfs", "-o", "ro,nosuid", "/usr", str(made.root / "usr"))
        yield made
    finally:
        made("freebsd-shim", "purge")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        left = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(made.root) in line]
        own = str(made.state).strip("/").replace("/", "-")
        left += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/freebsd_shim/{own}")]
        assert not left
