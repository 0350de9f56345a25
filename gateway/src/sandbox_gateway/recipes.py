"""Template recipes, and the digest that identifies equal recipes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sandbox_gateway.errors import Invalid
from sandbox_gateway.image_references import parse_image_reference
from sandbox_gateway.records import Resources

_MAX_DIGEST_SECONDS = 300
"""The time limit for computing the digest of a source, which occupies one of the gateway's threads."""
_MAX_DIGEST_ENTRIES = 2_000_000
"""The maximum number of files in a source directory. Each takes about 500 bytes of memory."""
_PACKAGE_PATTERN = re.compile(r"[a-z0-9][a-z0-9.+-]{1,127}(:[a-z0-9]{1,16})?(=[A-Za-z0-9.+~:-]{1,128})?")


class Source(StrEnum):
    DEBOOTSTRAP = "debootstrap"
    ROOTFS = "rootfs"
    IMAGE = "image"
    TEMPLATE = "template"


class Recipe(BaseModel):
    """A description of how to build a template.

    ``setup`` commands and ``start_command`` run as root inside the booted sandbox, through ``/bin/sh -c``. Then
    ``ready_probe`` runs there every half second until its exit code is 0, for at most ``ready_timeout`` seconds.
    """

    model_config = ConfigDict(extra="forbid")

    source: Source = Source.DEBOOTSTRAP
    suite: str = Field(default="bookworm", pattern=r"^[a-z][a-z0-9-]{0,63}$")
    mirror: str = ""
    """APT mirror to build from; empty: the host's own sources."""
    packages: list[str] = Field(default_factory=list, max_length=2000)
    path: str = ""
    """With ``rootfs``: the absolute path of a directory or a (compressed) tarball on the gateway's host."""
    image: str = ""
    """With ``image``: a reference to an OCI image, in a form that ``parse_image_reference`` accepts."""
    template: str = ""
    """With ``template``: the name or id of the template whose disk the new one starts with."""
    setup: list[str] = Field(default_factory=list, max_length=1000)
    start_command: str = ""
    ready_probe: str = ""
    ready_timeout: float = Field(default=60, gt=0, le=3600)
    setup_timeout: float = Field(default=1800, gt=0, le=86400)
    setup_network: bool = True
    """Whether the machine has access to the network until it is captured."""
    resources: Resources = Field(default_factory=Resources)

    @model_validator(mode="after")
    def _check_consistency(self) -> Recipe:
        if self.source is Source.ROOTFS and not self.path.startswith("/"):
            raise ValueError(
                "a rootfs template needs the field 'path': set it to the absolute path of a directory or "
                "tarball on the host"
            )
        if self.source is not Source.ROOTFS and self.path:
            raise ValueError("'path' is valid only with 'from: rootfs': remove 'path', or set 'from: rootfs'")
        if self.source is not Source.IMAGE and self.image:
            raise ValueError("'image' is valid only with 'from: image': remove 'image', or set 'from: image'")
        if self.source is not Source.TEMPLATE and self.template:
            raise ValueError("'template' is valid only with 'from: template': remove it, or set 'from: template'")
        if self.source is Source.IMAGE:
            self._check_image()
        if self.source is Source.TEMPLATE:
            self._check_template()
        for package in self.packages:
            if not _PACKAGE_PATTERN.fullmatch(package):
                raise ValueError(
                    f"{package[:80]!r} is not a valid Debian package name: use NAME, NAME:ARCHITECTURE or NAME=VERSION"
                )
        return self

    def _check_image(self) -> None:
        if not self.image:
            raise ValueError(
                "a template from an image needs the field 'image': set it to a reference such as "
                "docker://registry.example/app:1.0"
            )
        parse_image_reference(self.image)
        if self.packages:
            raise ValueError("'packages' cannot be added to an image: install them with a command in 'setup'")

    def _check_template(self) -> None:
        if not self.template:
            raise ValueError("a template from a template needs the field 'template': set it to a name or an id")
        if self.packages:
            raise ValueError("'packages' cannot be added to a template: install them with a command in 'setup'")

    def compute_digest(self, *salts: str) -> str:
        """Return the hex SHA-256 of the canonical recipe and ``salts`` (the digests of the guest and the source)."""
        fields = {**self.model_dump(mode="json"), "packages": sorted(set(self.packages))}
        if not self.image:
            # Recipes without an image have the same digest as before images were supported, and the same for templates.
            del fields["image"]
        if not self.template:
            del fields["template"]
        if self.setup_network:
            # The same applies to recipes that do not restrict the network.
            del fields["setup_network"]
        return _compute_digest(fields, salts)


def _compute_digest(data: dict[str, Any], salts: tuple[str, ...]) -> str:
    text = json.dumps([data, *salts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def compute_source_digest(recipe: Recipe) -> str:
    """Return a digest of the source at ``recipe.path``, or "" if the recipe has no path.

    The digest covers the contents of a tarball, or the paths, modes, sizes and modification times of everything in a
    directory. Raises Invalid if the source cannot be read within five minutes.
    """
    if not recipe.path:
        return ""
    path = Path(recipe.path)
    try:
        if path.is_dir():
            return _compute_tree_digest(path)
        return digest_file(path)
    except OSError as error:
        raise Invalid(
            f"the root file system {recipe.path} cannot be read on the gateway's host: {error.strerror}. Correct "
            "'path', or copy the files to that host"
        ) from None


def digest_file(path: Path) -> str:
    """Return the hex SHA-256 of a regular file. Raises OSError for other files, and if it takes too long."""
    # Opening a device can have side effects. Opening a pipe that replaces the file after this check must not block.
    if not stat.S_ISREG(path.stat().st_mode):
        raise _create_not_regular_error()
    deadline = time.monotonic() + _MAX_DIGEST_SECONDS
    hasher = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _create_not_regular_error()
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
            _check_deadline(deadline)
    return hasher.hexdigest()


def _create_not_regular_error() -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file")


def _check_deadline(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise OSError(errno.ETIMEDOUT, f"reading it takes longer than {_MAX_DIGEST_SECONDS} s")


def _compute_tree_digest(root: Path) -> str:
    deadline = time.monotonic() + _MAX_DIGEST_SECONDS
    hasher = hashlib.sha256()
    for path in sorted(_walk_tree(root, deadline)):
        status = path.lstat()
        fields = f"{path.relative_to(root)}\0{status.st_mode}\0{status.st_size}\0"
        hasher.update(fields.encode(errors="surrogateescape"))
        hasher.update(str(status.st_mtime_ns).encode())
        _check_deadline(deadline)
    return hasher.hexdigest()


def _walk_tree(root: Path, deadline: float) -> Iterator[Path]:
    """Yield everything in ``root``. Unlike ``Path.rglob``, this does not recurse, so the tree can be deep."""
    directories = [root]
    count = 0
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                count += 1
                if count > _MAX_DIGEST_ENTRIES:
                    raise OSError(errno.EFBIG, f"it contains more than {_MAX_DIGEST_ENTRIES} files")
                _check_deadline(deadline)
                yield Path(entry)
                if entry.is_dir(follow_symlinks=False):
                    directories.append(Path(entry))
