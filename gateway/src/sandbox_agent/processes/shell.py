"""Find a shell for clients that run /bin/bash in a sandbox that does not have it."""

from __future__ import annotations

import os

BASH = "/bin/bash"
SH = "/bin/sh"


def resolve_program(argv: list[str], path: str) -> tuple[str, list[str]]:
    """Return the program to run for ``argv``, and the arguments to pass to it. ``path`` is the value of PATH.

    E2B's ``commands.run`` and ``pty.create`` always use /bin/bash, which FreeBSD and some Linux systems do not have.
    It is replaced with a bash elsewhere in PATH, or else with /bin/sh as a login shell. In /bin/sh, bash features fail
    with an error message from the shell, which begins with "sh:".
    """
    if argv[0] != BASH or os.access(BASH, os.X_OK):
        return argv[0], argv
    for directory in path.split(":"):
        bash_path = os.path.join(directory, "bash")
        if directory and os.path.isfile(bash_path) and os.access(bash_path, os.X_OK):
            return bash_path, argv
    # Not every shell supports -l, but a leading dash in argv[0] makes any of them a login shell.
    if argv[1:3] == ["-l", "-c"]:
        return SH, ["-sh", *argv[2:]]
    if argv[1:] == ["-i", "-l"]:
        return SH, ["-sh", "-i"]
    return argv[0], argv
