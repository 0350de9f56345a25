"""Turn the steps that E2B's client records for an image into commands of a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_gateway.errors import Invalid, Unsupported

_LAUNCHER = "/opt/sandbox/start"
"""Runs a program like the image's entry point. Every template from an image contains it."""
_SHELL = ("/bin/sh", "-c")
COPY_PROBLEM = (
    "files cannot be copied into a template that is being built: put them into the image, or let run_cmd download them"
)


@dataclass
class ImageSteps:
    """The commands of a build. Each step sees the variables, the user and the directory that earlier steps have set."""

    commands: list[str] = field(default_factory=list)
    _changes: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, args: Sequence[str]) -> None:
        """Add a step. Raises Unsupported if it cannot be carried out, Invalid if it has the wrong arguments."""
        match kind, list(args):
            case "RUN", [command]:
                self.commands.append(self.command(command))
            case "RUN", [command, user]:
                self.commands.append(self.command(command, user=user))
            case "ENV", pairs if pairs and len(pairs) % 2 == 0:
                variables = dict(zip(pairs[::2], pairs[1::2], strict=True))
                self._changes["env"] = {**self._changes.get("env", {}), **variables}
            case "WORKDIR", [directory] if directory:
                self._changes["cwd"] = self._resolve(directory)
            case "USER", [user] if user:
                self._changes["user"] = user
            case "COPY", _:
                raise Unsupported(COPY_PROBLEM)
            case (("RUN" | "ENV" | "WORKDIR" | "USER"), _):
                raise Invalid(
                    f"the step {kind} has {len(args)} arguments, a number that it does not accept: correct it"
                )
            case _:
                raise Unsupported(f"the step {kind[:40]!r} is not supported: use RUN, ENV, WORKDIR and USER")

    def command(self, text: str, **changes: Any) -> str:
        """Return a shell command that runs ``text`` in the image's environment, changed by the steps so far."""
        settings = {"args": [*_SHELL, text], **self._changes, **changes}
        return f"exec {_LAUNCHER} {shlex.quote(json.dumps(settings))}"

    def _resolve(self, directory: str) -> str:
        if directory.startswith("/"):
            return directory
        if "cwd" not in self._changes:
            raise Invalid(f"the working directory {directory[:200]!r} is relative: use an absolute path first")
        return f"{self._changes['cwd'].rstrip('/')}/{directory}"


def compile_steps(steps: Iterable[tuple[str, Sequence[str]]]) -> ImageSteps:
    compiled_steps = ImageSteps()
    for kind, args in steps:
        compiled_steps.add(kind, args)
    return compiled_steps
