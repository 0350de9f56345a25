"""A real `sandbox-gateway serve` process, with its own state directory, socket and network range."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support import session

TEMPLATE = "debian"
PROGRAM = (str(Path(sys.executable).with_name("sandbox-gateway")),)
_BUILD_SECONDS = 900


class Gateway:
    """One daemon, with ``environment`` added to this process's. ``client`` connects as an administrator over
    ``socket``; programs use ``url``.
    """

    def __init__(
        self,
        xfs_root: Path,
        config: dict[str, dict[str, Any]],
        environment: dict[str, str] | None = None,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        network = session.network()
        self.prefix = network["prefix"]
        self.root = session.run_dir() / self.prefix
        self.root.mkdir()
        self.state_root = xfs_root / self.prefix
        self.state_root.mkdir()
        self.socket = self.root / "gw.sock"
        self.log_file = self.root / "gateway.log"
        self.config = self.root / "gateway.toml"
        self.url = f"unix://{self.socket}"
        self._environment = environment or {}
        self._program = program
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://gateway", timeout=300
        )
        settings: dict[str, dict[str, Any]] = {
            "server": {"socket": str(self.socket)},
            "host": {"state_root": str(self.state_root), "cache_root": str(session.cache_dir())},
            "kvm_xfs": {"accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
            "network": {**network, "pool": 2},
            "log": {"level": "debug"},
        }
        for section, values in config.items():
            settings.setdefault(section, {}).update(values)
        self.config.write_text(_toml(settings))

    def start(self, *, seconds: float = 90) -> None:
        """Start the daemon and wait until it answers; raises with the end of its log if it does not."""
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._program, "serve", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended with {self.process.returncode}:\n{self.log_tail()}")
            if self.is_answering():
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not answer within {seconds:g} s:\n{self.log_tail()}")
            time.sleep(0.05)

    def is_answering(self) -> bool:
        try:
            return self.client.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill_9(self) -> None:
        """End the daemon like a crash; its sandboxes keep running."""
        self._signal(signal.SIGKILL)

    def stop(self, *, seconds: float = 30) -> int:
        """SIGTERM; returns the exit code."""
        return self._signal(signal.SIGTERM, seconds)

    def restart(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        self.start()

    def _signal(self, number: signal.Signals, seconds: float = 30) -> int:
        assert self.process is not None, "the gateway was never started"
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def call(self, method: str, path: str, body: Any = None, *, status: int | None = None, **more: Any) -> Any:
        """The answer's JSON (None if empty). Any status except ``status`` (default: any 2xx) fails, with the answer."""
        answer = self.client.request(method, path, json=body, **more)
        wanted = answer.is_success if status is None else answer.status_code == status
        assert wanted, f"{method} {path}: {answer.status_code} {answer.text[:1000]}\n{self.log_tail(15)}"
        return answer.json() if answer.content else None

    def execute(self, sandbox: str, *args: str, **options: Any) -> dict[str, Any]:
        """Run a command in a sandbox: ``{exitCode, stdout, stderr, timedOut}``."""
        result = self.call("POST", f"/sandboxes/{sandbox}/exec", {"args": list(args), **options})
        assert isinstance(result, dict)
        return result

    def sh(self, sandbox: str, script: str) -> str:
        """The output of a shell command that must succeed."""
        result = self.execute(sandbox, "/bin/sh", "-c", script)
        assert result["exitCode"] == 0, result
        return str(result["stdout"])

    def end(self) -> list[str]:
        """Remove all sandboxes, stop the daemon, remove its directories; returns the errors."""
        problems: list[str] = []
        try:
            if not self.is_answering():
                if self.process is not None and self.process.poll() is None:
                    self.kill_9()
                self.start()
            for sandbox in self._sandboxes():
                answer = self.client.delete(f"/sandboxes/{sandbox}")
                if answer.status_code not in (204, 404):
                    problems.append(f"sandbox {sandbox} was not removed: {answer.text[:500]}")
            code = self.stop()
            if code != 0:
                problems.append(f"gateway {self.prefix} ended with {code} on SIGTERM:\n{self.log_tail()}")
        except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            problems.append(f"gateway {self.prefix} did not end as it should: {error}")
            if self.process is not None and self.process.poll() is None:
                self.kill_9()
        self.client.close()
        return problems

    def _sandboxes(self) -> list[str]:
        found: list[str] = []
        query: dict[str, Any] = {"limit": 1000}
        while True:
            answer = self.client.get("/sandboxes", params=query)
            answer.raise_for_status()
            found += [item["sandboxID"] for item in answer.json()]
            if not (token := answer.headers.get("x-next-token")):
                return found
            query["nextToken"] = token


def build_template(gateway: Gateway, name: str, **recipe: Any) -> dict[str, Any]:
    """Build (or find) a template and wait until it is ready; fails with the end of the build's log."""
    body = {"name": name, "from": "debootstrap", "cpuCount": 1, "memoryMB": 256, "diskSizeMB": 2048, **recipe}
    made = gateway.call("POST", "/templates", body)
    deadline = time.monotonic() + _BUILD_SECONDS
    status: dict[str, Any] = {"status": made["buildStatus"]}
    while status["status"] == "building":
        assert time.monotonic() < deadline, f"template {name} was not built within {_BUILD_SECONDS} s: {status}"
        time.sleep(0.5)
        status = gateway.call("GET", f"/templates/{made['templateID']}/builds/{made['buildID']}/status")
    if status["status"] != "ready":
        logs = "\n".join(status.get("logs", [])[-40:])
        raise AssertionError(f"template {name} failed: {status.get('reason')}\n{logs}\n{gateway.log_tail()}")
    found = gateway.call("GET", f"/templates/{name}")
    assert isinstance(found, dict)
    return found


def _toml(settings: dict[str, dict[str, Any]]) -> str:
    """Sections of plain values; JSON's notation of strings, numbers, booleans and lists is valid TOML.

    The section "" holds the keys outside of any section.
    """
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.get("", {}).items()]
    for section, values in settings.items():
        if section:
            lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
