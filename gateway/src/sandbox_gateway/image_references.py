"""References to OCI images, such as `docker://registry.example:5000/team/app:1.2` and `oci-archive:/srv/app.tar`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

MAX_LENGTH = 1024
_DEFAULT_REGISTRY = "docker.io"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])"
_REGISTRY_PATTERN = re.compile(rf"{_HOST}(?::(?P<port>[0-9]{{1,5}}))?")
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME_PATTERN = re.compile(
    rf"(?P<name>(?:(?P<registry>{_HOST}(?::[0-9]{{1,5}})?)/)?{_COMPONENT}(?:/{_COMPONENT})*)"
    rf"(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{_DIGEST}))?"
)


class Transport(StrEnum):
    """Where an image is. The values are skopeo's names."""

    REGISTRY = "docker"
    LAYOUT = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"


@dataclass(frozen=True)
class ImageReference:
    """A reference to an image in a registry, or at an absolute path on the gateway's host."""

    transport: Transport
    registry: str = ""
    """HOST or HOST:PORT."""
    name: str = ""
    """The repository, with the registry: `docker.io/library/debian`."""
    path: str = ""
    tag: str = ""
    """In a registry, "latest" by default. In an archive or a layout, "" means its only image."""
    digest: str = ""

    def __str__(self) -> str:
        if self.transport is Transport.REGISTRY:
            version = f"@{self.digest}" if self.digest else f":{self.tag}"
            return f"docker://{self.name}{version}"
        return f"{self.transport}:{self.path}{':' if self.tag else ''}{self.tag}"


@dataclass(frozen=True)
class RegistryLogin:
    """The user name and the password for a registry. They are in no record, recipe or log."""

    username: str
    password: str = field(repr=False)


def is_registry_host(text: str) -> bool:
    """Return whether ``text`` is HOST or HOST:PORT."""
    match = _REGISTRY_PATTERN.fullmatch(text)
    return match is not None and int(match["port"] or 443) in range(1, 65536)


def parse_image_reference(text: str) -> ImageReference:
    """Parse a reference. Without a transport, it names an image in a registry, as in Docker: `python:3.12-slim`.

    Raises ValueError with a sentence that names the accepted forms.
    """
    transport, _, rest = text.partition(":")
    if len(text) > MAX_LENGTH:
        pass
    elif transport in (Transport.LAYOUT, Transport.OCI_ARCHIVE, Transport.DOCKER_ARCHIVE) and rest.startswith("/"):
        path, _, tag = rest.partition(":")
        if _is_plain_path(path) and (not tag or _is_image_name(tag)) and not rest.endswith(":"):
            return ImageReference(Transport(transport), path=path, tag=tag)
    elif match := _NAME_PATTERN.fullmatch(text.removeprefix(f"{Transport.REGISTRY}://")):
        return _create_registry_reference(match)
    raise ValueError(
        f"the image {text[:200]!r} is not valid: use docker://REGISTRY/NAME:TAG, oci:/DIRECTORY[:TAG], "
        "oci-archive:/FILE[:TAG] or docker-archive:/FILE[:NAME:TAG], with an absolute path that contains no colon"
    )


def _create_registry_reference(match: re.Match[str]) -> ImageReference:
    registry, name, digest = match["registry"] or "", match["name"], match["digest"] or ""
    if not (registry == "localhost" or any(character in registry for character in ".:[")):
        # As in Docker: a first component that cannot be a host name belongs to the name.
        registry = _DEFAULT_REGISTRY
        name = f"{registry}/{name}" if "/" in name else f"{registry}/library/{name}"
    return ImageReference(
        Transport.REGISTRY,
        registry=registry,
        name=name,
        tag="" if digest else match["tag"] or "latest",
        digest=digest,
    )


def _is_plain_path(path: str) -> bool:
    return "\0" not in path and ".." not in path.split("/")


def _is_image_name(text: str) -> bool:
    """Return whether ``text`` is a tag, or a name with an optional tag, as archives contain them."""
    return bool(re.fullmatch(_TAG, text) or ((match := _NAME_PATTERN.fullmatch(text)) and not match["digest"]))
