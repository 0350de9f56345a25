"""A real registry for artifacts, and gateways that use it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.support import session
from tests.support.images import running_registry
from tests.support.memory_gateway import MemoryGateway


class Registry:
    """A registry process, which can be killed and started again with the same contents."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.directory = directory
        self.port = session.allocate_port()
        self.address = f"127.0.0.1:{self.port}"
        self._options = options
        self._stack = contextlib.ExitStack()

    def start(self) -> None:
        self._stack.enter_context(running_registry(self.directory, port=self.port, **self._options))

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._stack.close()

    def list_blobs(self) -> dict[str, Path]:
        """Return the files of the stored blobs, by digest."""
        root = self.directory / "storage/docker/registry/v2/blobs/sha256"
        return {f"sha256:{path.parent.name}": path for path in root.glob("*/*/data")}

    def read_manifest(self, reference: str) -> dict[str, Any]:
        repository, _, tag = reference.removeprefix(f"{self.address}/").partition(":")
        headers = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        response = httpx.get(f"http://{self.address}/v2/{repository}/manifests/{tag}", headers=headers)
        manifest: dict[str, Any] = response.raise_for_status().json()
        return manifest


@contextlib.contextmanager
def registry_started(directory: Path, **options: Any) -> Iterator[Registry]:
    """Run a registry inside this context. The test may kill it, and start it again."""
    registry = Registry(directory, **options)
    registry.start()
    try:
        yield registry
    finally:
        registry.kill()


@contextlib.contextmanager
def running_gateway(root: Path, registry: Registry, **settings: Any) -> Iterator[MemoryGateway]:
    root.mkdir(exist_ok=True)
    section = {"allowed": [registry.address], "plain_http": [registry.address], **settings}
    gateway = MemoryGateway(root, registry=section)
    try:
        gateway.build_template("base")
        yield gateway
    finally:
        gateway.end()
    assert gateway.host.partial_imports == set() and gateway.engine.transfers._active_count == 0
    assert all(source.is_closed for source in gateway.host.sources)
    assert list((root / "pulled-blobs").glob(".*")) == []


def write(client: httpx.Client, key: str, value: str, sandbox: str = "source") -> None:
    client.post(f"/sandboxes/{sandbox}/exec", json={"args": ["write", key, value]}).raise_for_status()


def read(client: httpx.Client, key: str, sandbox: str) -> str:
    output: str = client.post(f"/sandboxes/{sandbox}/exec", json={"args": ["read", key]}).json()["stdout"]
    return output


def take(client: httpx.Client, name: str = "taken") -> dict[str, Any]:
    snapshot: dict[str, Any] = client.post("/sandboxes/source/snapshots", json={"name": name}).raise_for_status().json()
    return snapshot


def wait_for(client: httpx.Client, response: httpx.Response) -> dict[str, Any]:
    """Wait until a transfer has finished, and return it."""
    assert response.status_code == 202, response.text
    transfer: dict[str, Any] = response.json()
    deadline = time.monotonic() + 60
    while transfer["status"] == "running":
        assert time.monotonic() < deadline, transfer
        time.sleep(0.02)
        transfer = client.get(f"/transfers/{transfer['transferID']}").raise_for_status().json()
    return transfer


def get_signer(client: httpx.Client) -> str:
    signer: str = client.get("/signer").json()["fingerprint"]
    return signer
