"""Resolve the digest of an image, and copy the image into an OCI layout, with skopeo."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import platform
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_gateway.command import CommandTimeout, read_proxy_settings, run_async_bytes
from sandbox_gateway.config import KvmXfs
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.hosts.kvm_xfs.template.oci.confinement import WORK, confine
from sandbox_gateway.hosts.kvm_xfs.template.oci.measuring import measure_file_sizes, run_measured
from sandbox_gateway.image_references import ImageReference, RegistryLogin, Transport
from sandbox_gateway.recipes import digest_file

_INSPECT_TIMEOUT_SECONDS = 60
_COPY_TIMEOUT_SECONDS = 3600
_STALL_SECONDS = 120
_MIN_PROGRESS_BYTES = 256 << 10
"""A registry must send at least this much every ``_STALL_SECONDS``, because it occupies one of the build slots."""
_MAX_JSON_BYTES = 4 << 20
"""The maximum size of a manifest, as in skopeo."""
_MAX_LAYERS = 500
_AUTH_FILE = "/auth.json"
_SOURCE = "/image"
LAYOUT = "layout"
"""The name of the OCI layout in the work directory. The tag of its only image is `image`."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's names for architectures, which images use, keyed by the names that `uname -m` prints."""


_LAYER_TYPES = {
    f"application/vnd.oci.image.layer.{kind}v1.tar{suffix}": suffix == "+gzip"
    for kind in ("", "nondistributable.")
    for suffix in ("", "+gzip")
}
"""Whether a layer is compressed, keyed by its media type. umoci also relies on the media type."""


@dataclass(frozen=True)
class Layer:
    path: Path
    """The file of the layer, relative to the work directory."""
    is_gzip: bool


@dataclass(frozen=True)
class CopiedImage:
    """An image in the OCI layout of a work directory."""

    config: Mapping[str, Any]
    """The image's configuration, as its builder wrote it."""
    layers: Sequence[Layer]
    """The layers, from the lowest to the highest."""


async def resolve_digest(image: ImageReference, settings: KvmXfs, login: RegistryLogin | None = None) -> str:
    """Return the digest of an image in a registry: of its manifest, or of its list of manifests for several platforms.

    ``login``: for the registry. None: the credentials in the settings. For a layout, return a digest of its index, and
    for an archive, of the file. Raises Invalid if the registry sends an image whose digest differs from the one in the
    reference.
    """
    if image.transport is not Transport.REGISTRY:
        return await asyncio.to_thread(_digest_path, image)
    with tempfile.TemporaryDirectory(prefix="sandbox-image-") as directory:
        argv = ["inspect", "--raw", *_build_access_options(image, settings, "", login), _build_source(image)]
        output = await _run_skopeo(argv, image, Path(directory), settings, login, _INSPECT_TIMEOUT_SECONDS)
    # skopeo does not compare the manifest with the digest that the reference names.
    digest = f"sha256:{hashlib.sha256(output).hexdigest()}"
    if image.digest not in ("", digest):
        raise Invalid(
            f"the registry {image.registry} sent a different image for {image}, with the digest {digest}: check the "
            "reference, and do not trust the registry"
        )
    return digest


def _digest_path(image: ImageReference) -> str:
    path = Path(image.path, "index.json") if image.transport is Transport.LAYOUT else Path(image.path)
    try:
        return f"sha256:{digest_file(path)}"
    except OSError as error:
        raise Invalid(
            f"the image {path} cannot be read on the gateway's host: {error.strerror}. Correct the path, or copy the "
            "image to that host"
        ) from None


async def copy_image(
    image: ImageReference,
    work_directory: Path,
    settings: KvmXfs,
    max_bytes: int,
    log: Log,
    login: RegistryLogin | None = None,
) -> CopiedImage:
    """Copy an image into the OCI layout `layout` in ``work_directory``.

    ``login``: for the registry. None: the credentials in the settings. Raises Invalid if the image does not exist, is
    for a different platform, or is larger than ``max_bytes`` bytes, or if the registry stops sending.
    """
    log(f"fetching the image {image}")
    argv = [
        *("copy", "--quiet", *_build_access_options(image, settings, "src-", login)),
        *(_build_source(image), f"oci:{WORK / LAYOUT}:image"),
    ]
    # skopeo unpacks an archive into the directory before it copies the image.
    max_copied_bytes = max_bytes * (2 if image.transport is Transport.OCI_ARCHIVE else 1)
    progress = Progress(time.monotonic())

    async def check_size() -> None:
        size = await measure_file_sizes(work_directory)
        if image.transport is Transport.REGISTRY and progress.has_stalled(size, time.monotonic()):
            raise Invalid(
                f"the registry {image.registry} has sent less than {_MIN_PROGRESS_BYTES >> 10} KiB of the image "
                f"{image} within {_STALL_SECONDS} s: check the registry, and the network of the gateway's host"
            )
        if size > max_copied_bytes:
            raise Invalid(
                f"the image {image} is larger than {max_bytes >> 20} MiB, the size of the template's disk, even while "
                "compressed: set 'diskSizeMB' to a larger number"
            )

    program = _run_skopeo(argv, image, work_directory, settings, login, _COPY_TIMEOUT_SECONDS)
    await run_measured(program, check_size)
    return await asyncio.to_thread(read_layout, work_directory, image)


class Progress:
    """The growth of a copy. Times are in seconds, read from the same clock."""

    def __init__(self, now: float) -> None:
        self._size = 0
        self._time = now

    def has_stalled(self, size: int, now: float) -> bool:
        """Return whether a copy, which is now ``size`` bytes long, has grown too little for too long."""
        if size - self._size >= _MIN_PROGRESS_BYTES:
            self._size, self._time = size, now
        self._size = min(self._size, size)
        return now - self._time > _STALL_SECONDS


def read_layout(work_directory: Path, image: ImageReference) -> CopiedImage:
    """Read the manifest and the configuration of the copied image. Raises Invalid if the gateway cannot use it."""
    try:
        (entry,) = _read_json(work_directory / LAYOUT / "index.json")["manifests"]
        manifest = _read_json(work_directory / _build_blob_path(entry["digest"]))
        config = _read_json(work_directory / _build_blob_path(manifest["config"]["digest"]))
        paths = [_build_blob_path(layer["digest"]) for layer in manifest["layers"]]
        media_types = [str(layer["mediaType"]) for layer in manifest["layers"]]
    except (KeyError, TypeError, ValueError, OSError, RecursionError):
        raise Invalid(f"{image} is not a container image: use an image in the OCI or Docker format") from None
    if len(paths) > _MAX_LAYERS:
        raise Invalid(f"the image {image} has {len(paths)} layers: build it with at most {_MAX_LAYERS}")
    if any("zstd" in media_type for media_type in media_types):
        raise Invalid(f"a layer of the image {image} is compressed with zstd: build the image with gzip compression")
    if unknown_types := [media_type for media_type in media_types if media_type not in _LAYER_TYPES]:
        raise Invalid(
            f"unknown media type {unknown_types[0][:80]!r} of a layer of the image {image}: build the image with "
            "layers that are tar files"
        )
    _check_platform(image, config)
    layers = [Layer(path, _LAYER_TYPES[media_type]) for path, media_type in zip(paths, media_types, strict=True)]
    return CopiedImage(config, layers)


def _check_platform(image: ImageReference, config: Mapping[str, Any]) -> None:
    found_platform = f"{config.get('os') or 'linux'}/{config.get('architecture') or 'unknown'}"
    if found_platform != (expected_platform := f"linux/{find_architecture()}"):
        raise Invalid(
            f"the image {image} is for {found_platform[:80]}, but this host runs {expected_platform}: use an image for "
            f"{expected_platform}"
        )


def find_architecture() -> str:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise Invalid(
            f"templates cannot be built from images on this host's architecture {machine}: use 'from: rootfs'"
        )
    return _ARCHITECTURES[machine]


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    value = json.loads(data) if len(data) <= _MAX_JSON_BYTES else None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object of acceptable size")
    return value


def _build_blob_path(digest: object) -> Path:
    if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError("not a digest")
    return Path(LAYOUT, "blobs", *digest.split(":"))


# --- skopeo --------------------------------------------------------------------------------------------------------


def _build_source(image: ImageReference) -> str:
    """Return skopeo's name for the image. A path of the host appears as /image in skopeo's namespace."""
    if image.transport is Transport.REGISTRY:
        return str(image)
    return f"{image.transport}:{_SOURCE}{':' if image.tag else ''}{image.tag}"


def _build_access_options(
    image: ImageReference, settings: KvmXfs, prefix: str, login: RegistryLogin | None
) -> list[str]:
    if image.transport is not Transport.REGISTRY:
        return []
    use_tls = image.registry not in settings.insecure_registries
    # skopeo reads passwords from a file, because every user of the host can read command lines.
    has_credentials = login is not None or settings.registry_auth_file is not None
    authentication = f"--{prefix}authfile={_AUTH_FILE}" if has_credentials else f"--{prefix}no-creds"
    return [f"--{prefix}tls-verify={'true' if use_tls else 'false'}", authentication]


def _build_auth_file(image: ImageReference, login: RegistryLogin) -> bytes:
    token = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
    return json.dumps({"auths": {image.registry: {"auth": token}}}).encode()


async def _run_skopeo(
    argv: Sequence[str],
    image: ImageReference,
    work_directory: Path,
    settings: KvmXfs,
    login: RegistryLogin | None,
    timeout: float,
) -> bytes:
    is_remote = image.transport is Transport.REGISTRY
    inputs: dict[str, Path] = {}
    if not is_remote:
        inputs[_SOURCE] = Path(image.path)
    elif settings.registry_auth_file and login is None:
        inputs[_AUTH_FILE] = settings.registry_auth_file
    for path in inputs.values():
        if not await asyncio.to_thread(path.exists):
            raise Invalid(
                f"{path} does not exist on the gateway's host: correct the path, or copy the file to that host"
            )
    platform_options = ["--override-os", "linux", "--override-arch", find_architecture()]
    command = confine(
        ["skopeo", f"--tmpdir={WORK}", *platform_options, *argv],
        work_directory,
        inputs=inputs,
        network=is_remote,
        stdin_path=_AUTH_FILE if is_remote and login else "",
    )
    input = _build_auth_file(image, login) if is_remote and login else None
    env = read_proxy_settings() if is_remote else {}
    try:
        result = await run_async_bytes(command, timeout=timeout, input=input, env=env, max_output_bytes=_MAX_JSON_BYTES)
    except CommandTimeout:
        if not is_remote:
            raise Invalid(
                f"reading the image {image} took longer than {timeout:g} s: build a smaller image, or copy it to a "
                "faster disk"
            ) from None
        raise Invalid(
            f"the registry {image.registry} did not send a complete response for the image {image} within "
            f"{timeout:g} s: check the name of the registry, and the network of the gateway's host"
        ) from None
    if result.returncode != 0:
        raise explain_failure(image, result.stderr.decode(errors="replace"))
    return result.stdout


def explain_failure(image: ImageReference, output: str) -> Exception:
    """Turn skopeo's error messages into an error with a remedy."""
    reason = _find_last_message(output)
    for pattern, problem in _FAILURES.items():
        if re.search(pattern, reason):
            kind = NoSpace if "disk is full" in problem else Invalid
            return kind(problem.format(image=image, registry=image.registry or image.path))
    return BackendFailed(f"skopeo cannot read the image {image}: {reason or 'no message'}")


_FAILURES = {
    r"gave HTTP response to HTTPS client": "the registry {registry} does not use HTTPS: enable HTTPS, or ask an "
    "administrator to add it to kvm_xfs.insecure_registries in the gateway's configuration",
    r"x509:|certificate": "the certificate of the registry {registry} is not valid: install its CA certificate "
    "on the gateway's host, or correct the certificate",
    r"connection refused|no such host|i/o timeout|deadline exceeded|unreachable|no route to host|server misbehaving|"
    r"Temporary failure in name resolution": "the registry {registry} does not respond: check its name, and the "
    "network of the gateway's host",
    r"no image found in (?:manifest list|image index)": "the image {image} does not exist for this host's platform: "
    "use an image for Linux and this host's architecture",
    r"unauthorized|authentication required|denied|invalid username/password|status code 40[13]": "the registry "
    "{registry} refuses access to {image}: check the name, and pass a user name and a password, or ask an "
    "administrator to set kvm_xfs.registry_auth_file in the gateway's configuration",
    r"manifest unknown|name unknown|no descriptor found|not found|no such image|no such file|status code 404": "the "
    "image {image} does not exist: check its name and tag",
    r"more than one image": "{registry} contains several images: append ':' and the name of one of them",
    r"[Nn]o space left": "fetching the image {image} failed because the host's disk is full: free some space and build "
    "the template again",
    r"signature|policy": "the policy in /etc/containers/policy.json on the gateway's host rejects the image {image}: "
    "sign the image, or ask an administrator to change the policy",
}
"""Errors with a remedy, keyed by a pattern for skopeo's message. The first pattern that matches applies."""


def _find_last_message(output: str) -> str:
    """Return the text of skopeo's last line, which has the form `time="…" level=fatal msg="…"`."""
    lines = [line for line in output.splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    match = re.search(r'level=fatal msg="((?:[^"\\]|\\.)*)"', text)
    return (match[1].replace('\\"', '"') if match else text)[-600:]
