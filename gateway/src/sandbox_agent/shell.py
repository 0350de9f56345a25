"""The shell that clients ask for by name, and what stands in for it in a sandbox that has none of that name."""

from __future__ import annotations

import os

BASH = "/bin/bash"
SH = "/bin/sh"


def program(argv: list[str], path: str) -> tuple[str, list[str]]:
    """What to run for ``argv``, and under which arguments. ``path``: the variable PATH.

    The clients' ``commands.run`` and ``pty.create`` have bash run what they are given, at a place where FreeBSD never
    has it, and not every Linux. A bash elsewhere is as good. Where there is none the system's shell runs it, as a login
    shell too: what is in bash alone then fails by the shell's own words, which begin with "sh:".
    """
    if argv[0] != BASH or os.access(BASH, os.X_OK):
        return argv[0], argv
    for place in path.split(":"):
        elsewhere = os.path.join(place, "bash")
        if place and os.path.isfile(elsewhere) and os.access(elsewhere, os.X_OK):
            return elsewhere, argv
    # Not every shell knows -l; all know what the dash means.
    if argv[1:3] == ["-l", "-c"]:
        return SH, ["-sh", *argv[2:]]
    if argv[1:] == ["-i", "-l"]:
        return SH, ["-sh", "-i"]
    return argv[0], argv
