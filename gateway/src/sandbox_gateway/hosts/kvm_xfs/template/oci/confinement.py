"""Run programs that read untrusted data in namespaces where they can write to one directory only.

The programs see `/usr` and a few files of `/etc`, read-only, and no processes of the host. They have no capabilities
except those that the caller names. User namespaces are not used, because the files of a template must have their real
owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

WORK = Path("/work")
"""The path of the writable directory, as the program sees it."""

FILE_CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETFCAP")
"""Capabilities that set owners, modes and attributes of files."""

_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
_CONFIGURATION = ("/etc/containers", "/etc/passwd", "/etc/group")


def confine(
    argv: Sequence[str],
    work_directory: Path,
    *,
    inputs: Mapping[str, Path] | None = None,
    capabilities: Sequence[str] = (),
    network: bool = False,
    max_file_bytes: int = 0,
    max_memory_bytes: int = 0,
    stdin_path: str = "",
) -> list[str]:
    """Return the command that runs ``argv`` in its own namespaces. It requires bubblewrap.

    ``inputs``: files and directories of the host that the program can read, keyed by the path that it sees.
    ``stdin_path``: the path at which the program sees what the caller writes to the command's standard input. The file
    is in memory, and only the program sees it. The program inherits the environment, because every user of the host
    could read variables in the command line. ``run_async`` passes only a few variables.
    """
    limits = [
        *([f"--fsize={max_file_bytes}"] if max_file_bytes else []),
        *([f"--as={max_memory_bytes}"] if max_memory_bytes else []),
    ]
    files = [*_CONFIGURATION, *(_NETWORK_FILES if network else ())]
    variables = {"PATH": "/usr/sbin:/usr/bin", "HOME": str(WORK), "TMPDIR": str(WORK), "LC_ALL": "C"}
    return [
        *("bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
        *(() if network else ("--unshare-net",)),
        *("--ro-bind", "/usr", "/usr", *_build_top_level_arguments()),
        *("--proc", "/proc", "--dev", "/dev"),
        *(argument for file in files for argument in ("--ro-bind-try", file, file)),
        *("--bind", str(work_directory), str(WORK), "--chdir", str(WORK)),
        *(argument for target, source in (inputs or {}).items() for argument in ("--ro-bind", str(source), target)),
        *(("--ro-bind-data", "0", stdin_path) if stdin_path else ()),
        *(argument for key, value in variables.items() for argument in ("--setenv", key, value)),
        *("--cap-drop", "ALL", *(argument for name in capabilities for argument in ("--cap-add", name))),
        *("--", *(("prlimit", *limits, "--") if limits else ()), *argv),
    ]


def _build_top_level_arguments() -> list[str]:
    """Return the arguments that create /bin, /lib and the like as on the host: as links to /usr, or read-only."""
    arguments: list[str] = []
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments
