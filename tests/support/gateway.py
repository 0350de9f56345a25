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
_BUILD_TIMEOUT_SECONDS = 900


class Gateway:
    """A daemon with its own directories and network. ``environment``: variables to add to this process's environment.

    ``client`` connects over ``socket``, as an administrator. Programs can connect to ``url``.
    """

    def __init__(
        self,
        xfs_root: Path,
        config: dict[str, dict[str, Any]],
        environment: dict[str, str] | None = None,
        *,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        network = session.allocate_network()
        self.prefix = network["prefix"]
        self.root = session.get_run_dir() / self.prefix
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
            "host": {"state_root": str(self.state_root), "cache_root": str(session.get_cache_dir())},
            "kvm_xfs": {"accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
            "network": {**network, "pool": 2},
            "log": {"level": "debug"},
        }
        for section, values in config.items():
            settings.setdefault(section, {}).update(values)
        self.config.write_text(_format_toml(settings))

    def start(self, *, seconds: float = 90) -> None:
        """Start the daemon and wait until it responds. If it does not, raise RuntimeError with the end of its log."""
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
                raise RuntimeError(f"the gateway exited with code {self.process.returncode}:\n{self.log_tail()}")
            if self.is_responding():
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway did not answer within {seconds:g} s:\n{self.log_tail()}")
            time.sleep(0.05)

    def is_responding(self) -> bool:
        try:
            return self.client.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        """Kill the daemon with SIGKILL. Its sandboxes keep running."""
        self._send_signal(signal.SIGKILL)

    def stop(self, *, seconds: float = 30) -> int:
        """Stop the daemon with SIGTERM, and return its exit code."""
        return self._send_signal(signal.SIGTERM, seconds)

    def restart(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        self.start()

    def _send_signal(self, number: signal.Signals, seconds: float = 30) -> int:
        assert self.process is not None, "the gateway was never started"
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def call(self, method: str, path: str, body: Any = None, *, status: int | None = None, **options: Any) -> Any:
        """Send a request, and return the JSON of the response, or None if it is empty.

        Raises AssertionError with the response if its status is not ``status`` (default: any 2xx).
        """
        response = self.client.request(method, path, json=body, **options)
        is_expected = response.is_success if status is None else response.status_code == status
        assert is_expected, f"{method} {path}: {response.status_code} {response.text[:1000]}\n{self.log_tail(15)}"
        return response.json() if response.content else None

    def execute(self, sandbox: str, *args: str, **options: Any) -> dict[str, Any]:
        """Run a command in a sandbox, and return ``{exitCode, stdout, stderr, timedOut}``."""
        result = self.call("POST", f"/sandboxes/{sandbox}/exec", {"args": list(args), **options})
        assert isinstance(result, dict)
        return result

    def sh(self, sandbox: str, script: str) -> str:
        """Run a shell command, check that it succeeds, and return its output."""
        result = self.execute(sandbox, "/bin/sh", "-c", script)
        assert result["exitCode"] == 0, result
        return str(result["stdout"])

    def end(self) -> list[str]:
        """Remove all sandboxes and stop the daemon. Return a description of each problem."""
        problems: list[str] = []
        try:
            if not self.is_responding():
                if self.process is not None and self.process.poll() is None:
                    self.kill()
                self.start()
            for sandbox_id in self._list_sandbox_ids():
                response = self.client.delete(f"/sandboxes/{sandbox_id}")
                if response.status_code not in (204, 404):
                    problems.append(f"sandbox {sandbox_id} was not removed: {response.text[:500]}")
            exit_code = self.stop()
            if exit_code != 0:
                problems.append(f"gateway {self.prefix} exited with code {exit_code} after SIGTERM:\n{self.log_tail()}")
        except (RuntimeError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            problems.append(f"gateway {self.prefix} could not be stopped: {error}")
            if self.process is not None and self.process.poll() is None:
                self.kill()
        self.client.close()
        return problems

    def _list_sandbox_ids(self) -> list[str]:
        ids: list[str] = []
        query: dict[str, Any] = {"limit": 1000}
        while True:
            response = self.client.get("/sandboxes", params=query)
            response.raise_for_status()
            ids += [item["sandboxID"] for item in response.json()]
            if not (token := response.headers.get("x-next-token")):
                return ids
            query["nextToken"] = token


def build_template(gateway: Gateway, name: str, **recipe: Any) -> dict[str, Any]:
    """Build a template unless it exists, and wait until it is ready. Raises AssertionError if the build fails."""
    body = {"name": name, "from": "debootstrap", "cpuCount": 1, "memoryMB": 256, "diskSizeMB": 2048, **recipe}
    build = gateway.call("POST", "/templates", body)
    deadline = time.monotonic() + _BUILD_TIMEOUT_SECONDS
    status: dict[str, Any] = {"status": build["buildStatus"]}
    while status["status"] == "building":
        assert time.monotonic() < deadline, f"template {name} was not built within {_BUILD_TIMEOUT_SECONDS} s: {status}"
        time.sleep(0.5)
        status = gateway.call("GET", f"/templates/{build['templateID']}/builds/{build['buildID']}/status")
    if status["status"] != "ready":
        log_text = "\n".join(status.get("logs", [])[-40:])
        raise AssertionError(f"template {name} failed: {status.get('reason')}\n{log_text}\n{gateway.log_tail()}")
    template = gateway.call("GET", f"/templates/{name}")
    assert isinstance(template, dict)
    return template


def _format_toml(settings: dict[str, dict[str, Any]]) -> str:
    """Format sections of plain values as TOML. JSON strings, numbers, booleans and lists are valid TOML.

    The section "" contains the keys outside of any section.
    """
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.get("", {}).items()]
    for section, values in settings.items():
        if section:
            lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
