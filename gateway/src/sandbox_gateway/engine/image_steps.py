"""Turn the steps that E2B's client records for an image into commands of a recipe."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_gateway.errors import Invalid, Unsupported

LAUNCHER = "/opt/sandbox/start"
"""Runs a program in the same environment as the image's entry point. Every template from an image contains it."""
_COPIER = "/opt/sandbox/copy"
"""Copies the files of an archive, and removes the archive. Every template from an image contains it."""
_UNCHECKED_PREFIX = "e2b-"
_ARCHIVE = re.compile(rf"/opt/sandbox/((?:{_UNCHECKED_PREFIX})?[0-9a-f]{{64}})\.tar")
_MODE = re.compile(r"[0-7]{0,4}")
_SHELL = ("/bin/sh", "-c")
_MAX_COMMAND_BYTES = 120 << 10
"""Linux refuses arguments of 128 KiB or more."""
_MAX_ENV_BYTES = 64 << 10
_MAX_TEXT_LENGTH = 4096
"""The maximum length of the working directory, and of the user."""


def name_unchecked_archive(digest: str) -> str:
    """Return the name of an archive with a digest by E2B's client, which the gateway cannot check.

    The digest depends on more than the archive contains, such as the destination. The name of any other archive is its
    digest.
    """
    return f"{_UNCHECKED_PREFIX}{digest}"


def build_archive_path(name: str) -> str:
    """Return the path at which the command of a COPY step expects its archive in the sandbox."""
    return f"/opt/sandbox/{name}.tar"


def find_archive(command: str) -> str:
    """Return the name of the archive that ``command`` copies, or "" if it does not come from a COPY step."""
    prefix = f"exec {LAUNCHER} "
    if not (command.startswith(prefix) and _COPIER in command):
        return ""
    try:
        match json.loads(*shlex.split(command.removeprefix(prefix))):
            case {"args": [str(program), str(path), *_]} if program == _COPIER:
                archive = _ARCHIVE.fullmatch(path)
                return archive[1] if archive else ""
    except (ValueError, TypeError, RecursionError):
        pass  # It was written by a user.
    return ""


def needs_programs(command: str) -> bool:
    """Return whether ``command`` runs one of the programs that every template from an image contains."""
    return command.startswith(f"exec {LAUNCHER} ")


@dataclass
class ImageSteps:
    """The commands of a build. Each step sees the variables, the user and the directory that earlier steps have set.

    Each command contains all of these. The commands may therefore be much larger than the steps.
    """

    max_bytes: int
    """The maximum size of all commands."""
    expands_variables: bool = False
    """Whether ``${NAME}`` stands for a variable of the image, and ``$$`` for a dollar sign, in variables, working
    directories, users, and the destinations and owners of COPY steps.
    """
    commands: list[str] = field(default_factory=list)
    _changes: dict[str, Any] = field(default_factory=dict)
    _size: int = 0
    """The size of all commands."""
    _env_size: int = 0

    def add(self, kind: str, args: Sequence[str], archive: str = "") -> None:
        """Add a step. ``archive``: the name of the archive of a COPY step.

        Raises Unsupported if it cannot be carried out, or Invalid if its arguments are not valid.
        """
        match kind, list(args):
            case "RUN", [command]:
                self._add_command(self.build_command(command))
            case "RUN", [command, user]:
                self._add_command(self.build_command(command, user=_check_length("user", user)))
            case "ENV", pairs if pairs and len(pairs) % 2 == 0:
                for name, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self._set_variable(name, value)
            case "WORKDIR", [directory] if directory:
                self._changes["cwd"] = _check_length("working directory", self._resolve(directory))
            case "USER", [user] if user:
                self._changes["user"] = _check_length("user", user)
            case "COPY", [_, destination, *options] if destination and len(options) <= 2:
                self._add_copy(archive, destination, *options)
            case (("COPY" | "RUN" | "ENV" | "WORKDIR" | "USER"), _):
                raise Invalid(f"the step {kind} has the wrong number of arguments, {len(args)}: correct it")
            case _:
                raise Unsupported(f"the step {kind[:40]!r} is not supported: use COPY, RUN, ENV, WORKDIR and USER")

    def build_command(self, text: str, **changes: Any) -> str:
        """Return a shell command that runs ``text`` in the image's environment, changed by the steps so far.

        Raises Invalid if the command is too long.
        """
        return self._launch(text, args=[*_SHELL, text], **changes)

    def build_start_command(self, members: Mapping[str, Any]) -> str:
        """Return a shell command that starts the image's entry point, changed by ``members`` and the steps so far.

        ``members``: ``args`` replaces the entry point with its arguments, and ``cmd`` only the arguments. Returns "" if
        nothing changes.
        """
        if not members and not self._changes:
            return ""
        if members.get("args") == []:
            return "true"
        return self._launch("that starts the image", **members)

    def add_run(self, args: Sequence[str], extra_env: Mapping[str, str]) -> None:
        """Add a step that runs a program with variables that later steps do not see."""
        env = {**extra_env, **self._changes.get("env", {})}
        members: dict[str, Any] = {"env": env} if env else {}
        self._add_command(self._launch(" ".join(args), args=args, **members))

    def _launch(self, description: str, *, expand_args: bool = False, **members: Any) -> str:
        # The arguments come first, because messages show only the beginning of a command.
        settings = {**({"args": members["args"]} if "args" in members else {}), **self._changes, **members}
        if self.expands_variables:
            candidates = ("env", "cwd", "user", *(("args",) if expand_args else ()))
            expanded_members = [member for member in candidates if "$" in json.dumps(settings.get(member, ""))]
            if expanded_members:
                settings["expand"] = expanded_members
        command = f"exec {LAUNCHER} {shlex.quote(json.dumps(settings))}"
        if len(command) > _MAX_COMMAND_BYTES:
            raise Invalid(
                f"the command {description[:80]!r} is {len(command)} bytes long with its environment: send at most "
                f"{_MAX_COMMAND_BYTES >> 10} KiB, and put long commands and variables into a script in the image"
            )
        return command

    def _add_copy(self, archive: str, destination: str, owner: str = "", mode: str = "") -> None:
        if not _ARCHIVE.fullmatch(build_archive_path(archive)):
            raise Invalid(
                "the 'filesHash' of a COPY step must be 64 lower-case hexadecimal digits: send the SHA-256 of the files"
            )
        if not _MODE.fullmatch(mode):
            raise Invalid(f"the mode {mode[:80]!r} of a COPY step is not valid: use an octal mode such as 0755")
        args = [_COPIER, build_archive_path(archive), destination, _check_length("owner", owner), mode]
        # As in Docker, the files belong to root unless the step says otherwise.
        self._add_command(self._launch(f"COPY … {destination}", args=args, expand_args=True, user="root"))

    def _add_command(self, command: str) -> None:
        self._size += len(command)
        if self._size > self.max_bytes:
            raise Invalid(
                f"the commands are more than {self.max_bytes >> 10} KiB long in total, because each contains the "
                "variables of the steps before it: set fewer variables, or put commands into a script in the image"
            )
        self.commands.append(command)

    def _set_variable(self, name: str, value: str) -> None:
        env = self._changes.setdefault("env", {})
        self._env_size += len(name.encode()) + len(value.encode())
        if name in env:
            self._env_size -= len(name.encode()) + len(env[name].encode())
        if self._env_size > _MAX_ENV_BYTES:
            raise Invalid(
                f"the variables that the steps set take up more than {_MAX_ENV_BYTES >> 10} KiB in total: put long "
                "values into files in the image"
            )
        env[name] = value

    def _resolve(self, directory: str) -> str:
        if directory.startswith(("/", "${") if self.expands_variables else "/"):
            return directory
        if "cwd" not in self._changes:
            raise Invalid(f"the working directory {directory[:200]!r} is relative: use an absolute path first")
        return f"{self._changes['cwd'].rstrip('/')}/{directory}"


def _check_length(noun: str, text: str) -> str:
    if len(text) > _MAX_TEXT_LENGTH:
        raise Invalid(f"the {noun} {text[:80]!r} is {len(text)} characters long: use at most {_MAX_TEXT_LENGTH}")
    return text


def compile_steps(
    steps: Iterable[tuple[str, Sequence[str]] | tuple[str, Sequence[str], str]], max_bytes: int
) -> ImageSteps:
    """Compile steps. Each is a tuple of the arguments of ``ImageSteps.add``."""
    compiled_steps = ImageSteps(max_bytes)
    for step in steps:
        compiled_steps.add(*step)
    return compiled_steps
