"""Create OCI images, and a registry that serves them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_gateway.hosts.kvm_xfs.template.debian import unpack_debian
from sandbox_gateway.recipes import Recipe
from tests.support import session

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def make_entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return an entry of a layer: a file with ``data`` by default. ``fields``: attributes of its TarInfo."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    for key, value in fields.items():
        setattr(member, key, value)
    return member, data


def make_layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an uncompressed layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in entries:
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def make_layer_of_tree(root: Path, paths: Iterable[str]) -> bytes:
    """Return an uncompressed layer with files of a directory."""
    argv = ["tar", "--create", "--directory", str(root), "--numeric-owner", *paths]
    return subprocess.run(argv, check=True, capture_output=True, timeout=120).stdout


_LIBRARIES = "usr/lib/*-linux-gnu"
_SMALL_DEBIAN = [
    *("bin", "lib", "lib64", "usr/lib64", "etc/passwd", "etc/group"),
    *(f"usr/bin/{name}" for name in ("dash", "sh", "cat", "env", "id", "pwd", "sleep", "stat")),
    *(f"{_LIBRARIES}/{name}" for name in ("libc.so.6", "ld-linux-*", "libselinux.so.1", "libpcre2-8.so.0*")),
]
"""Files of a Debian tree that make a small image: without Python, systemd, ip, and bash."""


def make_small_debian_layer(directory: Path) -> bytes:
    """Return a layer with the files of ``_SMALL_DEBIAN``. ``directory``: for temporary files."""
    tree = directory / "debian"
    tree.mkdir()
    asyncio.run(unpack_debian(Recipe(), tree, directory, session.get_cache_dir(), lambda line: None))
    paths = [str(path.relative_to(tree)) for pattern in _SMALL_DEBIAN for path in tree.glob(pattern)]
    return make_layer_of_tree(tree, paths)


def write_layout(
    directory: Path,
    layers: Sequence[bytes],
    settings: Mapping[str, Any] | None = None,
    *,
    architecture: str = ARCHITECTURE,
    media_type: str = "application/vnd.oci.image.layer.v1.tar+gzip",
) -> Path:
    """Write an OCI layout with one image, whose tag is `test`. ``settings``: its entry point, environment and so on."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def write_blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def write_json(value: Any, kind: str) -> dict[str, Any]:
        return write_blob(json.dumps(value).encode(), f"application/vnd.oci.image.{kind}.v1+json")

    config = {
        "os": "linux",
        "architecture": architecture,
        "config": dict(settings or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": write_json(config, "config"),
        "layers": [write_blob(gzip.compress(data, 1, mtime=0), media_type) for data in layers],
    }
    reference = write_json({**manifest, "mediaType": "application/vnd.oci.image.manifest.v1+json"}, "manifest")
    reference["annotations"] = {"org.opencontainers.image.ref.name": "test"}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [reference]}))
    (directory / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return directory


USER, PASSWORD = "reader", "hunter2"
_PASSWORD_FILE = f"{USER}:$2b$04$abcdefghijklmnopqrstuuV3duMsC0HpUex6N9qapiuOHHWkwRXVm\n"


@contextlib.contextmanager
def running_registry(directory: Path, *, with_password: bool = False, port: int = 0) -> Iterator[str]:
    """Run a registry without HTTPS. Yields its HOST:PORT. ``with_password``: only USER with PASSWORD may use it."""
    address = f"127.0.0.1:{port or session.allocate_port()}"
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(directory / "storage")}},
        "http": {"addr": address},
    }
    directory.mkdir(exist_ok=True)
    if with_password:
        (directory / "htpasswd").write_text(_PASSWORD_FILE)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(directory / "htpasswd")}}
    (directory / "config.json").write_text(json.dumps(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(directory / "config.json")],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        _wait_until_ready(f"http://{address}/v2/", process, directory / "log")
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:  # The registry asks for a password.
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the registry did not start: {log.read_text()}") from None
            time.sleep(0.05)


def push_image(layout: Path, reference: str, auth_file: Path | None = None) -> None:
    """Copy the image of a layout to a registry without HTTPS. ``reference``: HOST:PORT/NAME:TAG."""
    options = [f"--dest-authfile={auth_file}"] if auth_file else []
    argv = [
        "skopeo",
        "copy",
        "--quiet",
        "--dest-tls-verify=false",
        *options,
        f"oci:{layout}:test",
        f"docker://{reference}",
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)


def write_auth_file(path: Path, registry: str) -> Path:
    """Write the credentials for a registry in the form of `skopeo login`."""
    token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path.write_text(json.dumps({"auths": {registry: {"auth": token}}}))
    path.chmod(0o600)
    return path
