"""The real daemon with an in-memory host, in a separate process, so that its descriptors and memory can be measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support import session
from tests.support.memory_gateway import ADMIN_KEY

_REPOSITORY = Path(__file__).parents[2]
_START_TIMEOUT_SECONDS = 60
_PROGRAM = """
import asyncio, resource, sys
from pathlib import Path
from sandbox_gateway.server import serving
from sandbox_gateway.config import load
from tests.support.memory_host import MemoryHost
if max_files := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
serving.make_host = lambda config: MemoryHost()
asyncio.run(serving.run(load(Path(sys.argv[1]))))
"""


class Daemon:
    """A daemon that listens on a unix socket and on ``port``.

    ``max_files``: its limit on open files, or 0 to use the limit of this process.
    """

    def __init__(self, root: Path, *, max_files: int = 0, **server: Any) -> None:
        # Paths of unix sockets must be short, and the directory of a test may have a long path.
        self._run_directory = tempfile.TemporaryDirectory(prefix="grove-daemon-")
        self.socket = Path(self._run_directory.name) / "gateway.sock"
        self.port = session.allocate_port()
        self.log = root / "daemon.log"
        keys, config = root / "keys", root / "config.toml"
        keys.write_text(f"root admin {ADMIN_KEY}\n")
        keys.chmod(0o600)
        settings = {"socket": str(self.socket), "listen": f"127.0.0.1:{self.port}", "key_file": str(keys), **server}
        lines = [
            f"{name} = {value if isinstance(value, int | float) else repr(value)}" for name, value in settings.items()
        ]
        config.write_text("\n".join(["[server]", *lines, "[host]", f"state_root = '{root}'", ""]))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(config), str(max_files)],
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])},
            )

    def __enter__(self) -> Daemon:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.check_health()
                return self
            except httpx.TransportError:
                time.sleep(0.05)
        self.end()
        raise RuntimeError(f"the daemon did not start:\n{self.log.read_text()}")

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._run_directory.cleanup()

    def connect_as_administrator(self) -> httpx.Client:
        """Return a client that connects over the unix socket, and so has administrator rights."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://gateway", timeout=30)

    def check_health(self) -> None:
        """Check that the daemon responds on the unix socket. Raises httpx.HTTPError."""
        with self.connect_as_administrator() as client:
            client.get("/health").raise_for_status()

    def create_sandbox(self, name: str = "one") -> dict[str, Any]:
        """Build the template `base`, create a sandbox from it, and return the sandbox's fields, including `address`."""
        with self.connect_as_administrator() as client:
            build = client.post("/templates", json={"name": "base"}).raise_for_status().json()
            client.get(f"/templates/base/builds/{build['buildID']}/logs", params={"follow": "true"})
            sandbox: dict[str, Any] = (
                client.post("/sandboxes", json={"templateID": "base", "name": name}).raise_for_status().json()
            )
            return sandbox | client.get(f"/sandboxes/{name}").raise_for_status().json()

    def measure_memory(self) -> int:
        """Return the resident memory of the daemon in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert match, "the daemon has ended"
        return int(match[1]) * 1024

    def count_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def read_metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric, or 0 if it does not exist yet."""
        with self.connect_as_administrator() as client:
            metrics_text = client.get("/metrics").text
        label_text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = re.escape(f"{name}{{{label_text}}}" if labels else name)
        match = re.search(rf"^{pattern} (\S+)$", metrics_text, re.MULTILINE)
        return float(match[1]) if match else 0.0
