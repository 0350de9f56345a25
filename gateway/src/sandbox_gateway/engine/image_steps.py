"""Turn the steps that E2B's client records for an image into commands of a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_gateway.errors import Invalid, Unsupported

_LAUNCHER = "/opt/sandbox/start"
"""Runs a program in the same environment as the image's entry point. Every template from an image contains it."""
_SHELL = ("/bin/sh", "-c")
_MAX_COMMAND_BYTES = 120 << 10
"""Linux refuses arguments of 128 KiB or more."""
_MAX_ENV_BYTES = 64 << 10
_MAX_TEXT_LENGTH = 4096
"""The maximum length of the working directory, and of the user."""
COPY_PROBLEM = (
    "files cannot be copied into a template that is being built: put them into the image, or let run_cmd download them"
)


@dataclass
class ImageSteps:
    """The commands of a build. Each step sees the variables, the user and the directory that earlier steps have set.

    Each command contains all of these. The commands may therefore be much larger than the steps.
    """

    max_bytes: int
    """The maximum size of all commands."""
    commands: list[str] = field(default_factory=list)
    _changes: dict[str, Any] = field(default_factory=dict)
    _size: int = 0
    """The size of all commands."""
    _env_size: int = 0

    def add(self, kind: str, args: Sequence[str]) -> None:
        """Add a step. Raises Unsupported if it cannot be carried out, Invalid if its arguments are not valid."""
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
            case "COPY", _:
                raise Unsupported(COPY_PROBLEM)
            case (("RUN" | "ENV" | "WORKDIR" | "USER"), _):
                raise Invalid(f"the step {kind} has the wrong number of arguments, {len(args)}: correct it")
            case _:
                raise Unsupported(f"the step {kind[:40]!r} is not supported: use RUN, ENV, WORKDIR and USER")

    def build_command(self, text: str, **changes: Any) -> str:
        """Return a shell command that runs ``text`` in the image's environment, changed by the steps so far.

        Raises Invalid if the command is too long.
        """
        settings = {"args": [*_SHELL, text], **self._changes, **changes}
        command = f"exec {_LAUNCHER} {shlex.quote(json.dumps(settings))}"
        if len(command) > _MAX_COMMAND_BYTES:
            raise Invalid(
                f"the command {text[:80]!r} is {len(command)} bytes long with its environment: send at most "
                f"{_MAX_COMMAND_BYTES >> 10} KiB, and put long commands and variables into a script in the image"
            )
        return command

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
        if directory.startswith("/"):
            return directory
        if "cwd" not in self._changes:
            raise Invalid(f"the working directory {directory[:200]!r} is relative: use an absolute path first")
        return f"{self._changes['cwd'].rstrip('/')}/{directory}"


def _check_length(what: str, text: str) -> str:
    if len(text) > _MAX_TEXT_LENGTH:
        raise Invalid(f"the {what} {text[:80]!r} is {len(text)} characters long: use at most {_MAX_TEXT_LENGTH}")
    return text


def compile_steps(steps: Iterable[tuple[str, Sequence[str]]], max_bytes: int) -> ImageSteps:
    compiled_steps = ImageSteps(max_bytes)
    for kind, args in steps:
        compiled_steps.add(kind, args)
    return compiled_steps
