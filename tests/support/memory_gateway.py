"""A complete gateway with an in-memory host, served in a thread over real sockets."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.server import serving
from tests.support import session
from tests.support.memory_host import Machine, MemoryHost

ADMIN_KEY, EXEC_KEY, READ_KEY = "admin-key-0123456789", "exec-key-0123456789", "read-key-0123456789"
OTHER_EXEC_KEY = "other-exec-key-0123456789"
_START_TIMEOUT_SECONDS = 60


class MemoryGateway:
    """A gateway that listens on a unix socket and on a loopback port."""

    def __init__(self, root: Path, host: MemoryHost | None = None, **sections: dict[str, Any]) -> None:
        self.root = root
        # Socket paths must be short, but a test's own directory may be deeply nested.
        self.run_directory = tempfile.TemporaryDirectory(prefix="grove-api-")
        self.socket = Path(self.run_directory.name) / "gateway.sock"
        self.port = session.allocate_port()
        key_file = root / "keys"
        key_file.write_text(
            f"# keys\nroot admin {ADMIN_KEY}\nrunner exec {EXEC_KEY}\n\nlooker read {READ_KEY}\n"
            f"helper exec {OTHER_EXEC_KEY}\n"
        )
        key_file.chmod(0o600)
        server_section = {"socket": str(self.socket), "listen": f"127.0.0.1:{self.port}", "key_file": str(key_file)}
        server_section |= sections.pop("server", {})
        config_data = {"server": server_section, "host": {"state_root": str(root)}, **sections}
        self.config = Config.model_validate(config_data)
        self.host = host or MemoryHost()
        self.loop = asyncio.new_event_loop()
        self.stop_event = asyncio.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.thread.start()
        self._wait_until_ready()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _serve(self) -> None:
        self.engine = Engine(self.host, self.config)
        await serving.serve(self.config, self.engine, self.stop_event)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self.thread.is_alive():
            try:
                with self.client() as client:
                    client.get("/health").raise_for_status()
                return
            except httpx.TransportError:
                time.sleep(0.02)
        raise RuntimeError(f"the gateway did not start: {self.failure}")

    def end(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop_event.set)
            self.thread.join(30)
        self.run_directory.cleanup()
        if self.failure:
            raise self.failure

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    def client(self, key: str | None = None) -> httpx.Client:
        """Return a client that connects over TCP with ``key``, or over the unix socket if ``key`` is None."""
        if key is None:
            transport = httpx.HTTPTransport(uds=str(self.socket))
            return httpx.Client(transport=transport, base_url="http://gateway", timeout=60)
        headers = {"X-API-Key": key} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def machine(self, sandbox_id: str) -> Machine:
        return self.host.machines[self.engine.sandboxes.get(sandbox_id).instance]

    def set_metadata(self, ref: str, metadata: dict[str, str]) -> None:
        """Replace a sandbox's metadata without the limits of the API, which older gateways did not have."""
        self.run_in_loop(self.engine.sandboxes.update(ref, metadata=metadata))

    def run_in_loop(self, work: Coroutine[Any, Any, object]) -> None:
        """Run an operation of the engine, which needs no request."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def build_template(self, name: str = "base", **recipe: Any) -> str:
        """Build a template, and return its id."""
        with self.client() as client:
            build = client.post("/templates", json={"name": name, **recipe}).json()
            route = f"/templates/{build['templateID']}/builds/{build['buildID']}"
            client.get(f"{route}/logs", params={"follow": True})
            status = client.get(f"{route}/status").json()
        assert status["status"] == "ready", status
        template_id: str = build["templateID"]
        return template_id

    def clear(self) -> None:
        """Remove every sandbox, snapshot and volume, and every template except `base`. End plan sessions."""
        self.host.fork_seconds, self.host.failing_names, self.host.build_seconds = 0.0, set(), 0.0
        with self.client() as client:
            for plan in client.get("/plans").json():
                client.delete(f"/plans/{plan['planID']}").raise_for_status()
            for run in client.get("/applied-runs").json():
                client.delete(f"/applied-runs/{run['runID']}").raise_for_status()
            for sandbox in client.get("/sandboxes?limit=1000").json():
                client.delete(f"/sandboxes/{sandbox['sandboxID']}").raise_for_status()
            for snapshot in client.get("/snapshots?limit=1000").json():
                client.delete(f"/snapshots/{snapshot['snapshotID']}").raise_for_status()
            # Newest first: a volume created from a snapshot must be removed before the volume of that snapshot.
            for volume in reversed(client.get("/volumes").json()):
                client.delete(f"/volumes/{volume['name']}?withSnapshots=true").raise_for_status()
            for template in client.get("/templates?limit=1000").json():
                if "base" not in template["names"] and template["buildStatus"] == "ready":
                    client.delete(f"/templates/{template['templateID']}").raise_for_status()


def create_sandbox(api: httpx.Client, **body: Any) -> dict[str, Any]:
    response = api.post("/sandboxes", json={"templateID": "base", **body})
    assert response.status_code == 201, response.text
    sandbox: dict[str, Any] = response.json()
    return sandbox


def run_command(api: httpx.Client, ref: str, *args: str, **options: Any) -> dict[str, Any]:
    response = api.post(f"/sandboxes/{ref}/exec", json={"args": args, **options})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result
