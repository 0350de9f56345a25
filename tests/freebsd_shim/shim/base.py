"""Shared code of the shim's commands: FreeBSD's error handling and getopt, the state directory, and system calls.

This module deliberately imports little: a command must finish in about 10 ms, and importing ``re``, ``json``,
``pathlib`` or ``subprocess`` takes about half of that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from _json import encode_basestring_ascii, make_scanner  # type: ignore[import-not-found]

PROG = "freebsd-shim"

# sys/errno.h and lib/libc/gen/errlst.c: messages in which FreeBSD differs from glibc.
_ERROR_TEXTS = {
    errno.ENXIO: "Device not configured",
    errno.EBUSY: "Device busy",
    errno.ENODEV: "Operation not supported by device",
    errno.EADDRNOTAVAIL: "Can't assign requested address",
    errno.EDQUOT: "Disc quota exceeded",
    errno.EXDEV: "Cross-device link",
    errno.EDEADLK: "Resource deadlock avoided",
    errno.EOPNOTSUPP: "Operation not supported",
    errno.EPROTONOSUPPORT: "Protocol not supported",
    errno.ERANGE: "Result too large",
}


def strerror(number: int) -> str:
    """Return FreeBSD's text for an errno, like strerror(3)."""
    return _ERROR_TEXTS.get(number) or os.strerror(number)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")


def warnx(message: str) -> None:
    """Print ``program: message`` on standard error, like warnx(3)."""
    sys.stdout.flush()
    sys.stderr.write(f"{PROG}: {message}\n")


def errx(code: int, message: str) -> SystemExit:
    """Print an error like errx(3), and return the exception to raise, as in ``raise errx(1, "…")``."""
    warnx(message)
    return SystemExit(code)


def warn(message: str, number: int) -> None:
    warnx(f"{message}: {strerror(number)}")


def err(code: int, message: str, number: int) -> SystemExit:
    """Print an error with the text of an errno, like err(3), and return the exception to raise."""
    return errx(code, f"{message}: {strerror(number)}")


def usage(text: str, code: int = 1) -> SystemExit:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    return SystemExit(code)


def unsupported(feature: str) -> SystemExit:
    """Report a feature of FreeBSD that the shim lacks, and return the exception to raise.

    The exit code is 70 (EX_SOFTWARE), which FreeBSD's commands do not use.
    """
    sys.stdout.flush()
    sys.stderr.write(f"freebsd-shim: {PROG}: {feature}: not implemented; see tests/freebsd_shim/README.md\n")
    return SystemExit(70)


class BadOption(Exception):
    """An option is unknown or lacks its argument. The error has already been printed."""


def getopt(argv: list[str], spec: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options and the remaining arguments. Like FreeBSD's getopt(3), stop at the first non-option."""
    options: list[tuple[str, str]] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            index += 1
            break
        if len(word) < 2 or word[0] != "-":
            break
        index += 1
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            position = spec.find(letter)
            if letter == ":" or position < 0:
                warnx(f"illegal option -- {letter}")
                raise BadOption(letter)
            if spec[position + 1 : position + 2] != ":":
                options.append((letter, ""))
                continue
            if not letters:
                if index >= len(argv):
                    warnx(f"option requires an argument -- {letter}")
                    raise BadOption(letter)
                letters, index = argv[index], index + 1
            options.append((letter, letters))
            letters = ""
    return options, argv[index:]


def parse_libxo(argv: list[str]) -> tuple[list[str], bool]:
    """Remove ``--libxo`` from the arguments, like xo_parse_args(3).

    Returns the remaining arguments and whether JSON is requested.
    """
    remaining, is_json, index = [], False, 0
    while index < len(argv):
        word = argv[index]
        index += 1
        if word == "--":
            remaining += argv[index - 1 :]
            break
        if word == "--libxo":
            if index >= len(argv):
                raise errx(1, "missing libxo option")
            style, index = argv[index], index + 1
        elif word.startswith("--libxo="):
            style = word[8:]
        elif word.startswith("--libxo:"):
            style = {"J": "json", "T": "text"}.get(word[8:], word[8:])
        else:
            remaining.append(word)
            continue
        if style not in ("json", "text"):
            raise unsupported(f"--libxo {style}")
        is_json = style == "json"
    return remaining, is_json


# JSON without the json package ------------------------------------------------------------------------------------


class _ScannerContext:
    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012


def from_json(text: str) -> object:
    return make_scanner(_ScannerContext)(text.strip(), 0)[0]  # type: ignore[arg-type]


def quote_json(text: str) -> str:
    result: str = encode_basestring_ascii(text)
    return result


def to_json(value: object) -> str:
    if isinstance(value, str):
        return quote_json(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote_json(str(k))}: {to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_json(v) for v in value) + "]"
    return repr(value)


# the state directory ----------------------------------------------------------------------------------------------


def get_state_dir() -> str:
    if "FREEBSD_SHIM_STATE" not in os.environ:
        _inherit_environment()
    return os.environ.setdefault("FREEBSD_SHIM_STATE", "/run/freebsd-shim")


def _inherit_environment() -> None:
    """Inherit the environment of the nearest ancestor process that sets FREEBSD_SHIM_STATE.

    This is necessary because a gateway gives its child processes a clean environment.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                ancestor_environment = dict(
                    part.partition("=")[::2] for part in os.fsdecode(file.read()).split("\0") if part
                )
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(") ")[2].split()[1])
        except OSError:
            return
        if "FREEBSD_SHIM_STATE" in ancestor_environment:
            for name, value in ancestor_environment.items():
                os.environ.setdefault(name, value)
            return


class locked:
    """A context manager that holds the lock of the state directory. A process may enter it more than once."""

    depth = 0
    handle: int = -1

    def __enter__(self) -> None:
        if locked.depth == 0:
            os.makedirs(get_state_dir(), mode=0o755, exist_ok=True)
            locked.handle = os.open(os.path.join(get_state_dir(), "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(locked.handle, fcntl.LOCK_EX)
        locked.depth += 1

    def __exit__(self, *_: object) -> None:
        locked.depth -= 1
        if locked.depth == 0:
            os.close(locked.handle)


def load(name: str, default: dict) -> dict:  # type: ignore[type-arg]
    """Return the contents of the state file ``name``, or ``default`` if it does not exist."""
    try:
        with open(os.path.join(get_state_dir(), name + ".json")) as file:
            return from_json(file.read())  # type: ignore[return-value]
    except FileNotFoundError:
        return default


def save(name: str, value: dict) -> None:  # type: ignore[type-arg]
    """Replace the state file ``name`` atomically. The caller holds the lock."""
    os.makedirs(get_state_dir(), mode=0o755, exist_ok=True)
    path = os.path.join(get_state_dir(), name + ".json")
    with open(path + ".new", "w") as file:
        file.write(to_json(value) + "\n")
    os.rename(path + ".new", path)


KNOBS = {
    "kern.racct.enable": "1",
    "kern.osreldate": "1403000",
    "linux": "0",
    "dying": "0",
    "busy": "",
    "pf.loaded": "1",
}
"""All knobs, with their defaults. See the README."""


def read_knob(name: str) -> str:
    """Return a knob's value. The environment variable ``FREEBSD_SHIM_<NAME>`` overrides the stored value."""
    variable = "FREEBSD_SHIM_" + name.upper().replace(".", "_")
    if variable in os.environ:
        return os.environ[variable]
    return str(load("knobs", {}).get(name, KNOBS[name]))


def read_osreldate() -> int:
    return int(read_knob("kern.osreldate"))


# system calls that os lacks (before Python 3.12) ------------------------------------------------------------------

MS_NOSUID, MS_NOEXEC, MS_BIND = 2, 8, 4096
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_NOATIME, MOUNT_ATTR__ATIME = 0x10, 0x70
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x04000000, 0x08000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, OPEN_TREE_CLONE = -100, 0x1000, 1
MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH = 0x04, 0x40

_libc = None


def _call_libc(name: str, *args: object) -> int:
    """Call a libc function that returns -1 and sets errno on failure. Raises OSError."""
    global _libc
    import ctypes

    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def mount_syscall(source: str, target: str, fstype: str, flags: int, data: str = "") -> None:
    import ctypes

    _call_libc(
        "mount", source.encode(), os.fsencode(target), fstype.encode(), ctypes.c_ulong(flags), data.encode() or None
    )


def clone_mount(source: str, attributes: int) -> int:
    """Return a descriptor of a new, detached mount of ``source`` with the MOUNT_ATTR_… flags ``attributes``."""
    import ctypes

    mount_fd = _call_libc("syscall", SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC)
    if attributes:
        cleared_attributes = (
            MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC | MOUNT_ATTR__ATIME
        )
        mount_attr = (ctypes.c_uint64 * 4)(attributes, cleared_attributes, 0, 0)
        _call_libc(
            "syscall",
            SYS_MOUNT_SETATTR,
            mount_fd,
            b"",
            AT_EMPTY_PATH,
            mount_attr,
            ctypes.c_size_t(ctypes.sizeof(mount_attr)),
        )
    return mount_fd


def attach_mount(mount_fd: int, target: int) -> None:
    """Attach a detached mount to the directory with the descriptor ``target``."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    _call_libc("syscall", SYS_MOVE_MOUNT, mount_fd, b"", target, b"", flags)


def umount_syscall(target: str, flags: int) -> None:
    _call_libc("umount2", os.fsencode(target), flags)


def setns(fd: int, kinds: int) -> None:
    _call_libc("setns", fd, kinds)


def unshare(kinds: int) -> None:
    _call_libc("unshare", kinds)


def prctl(option: int, value: int) -> None:
    import ctypes

    _call_libc("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def run(main: object, prog: str) -> None:
    """Run a command's ``main(argv)`` and exit with the code that it returns, or 70 after an unexpected exception."""
    global PROG
    PROG = prog
    code = 70
    try:
        code = main(sys.argv[1:])  # type: ignore[operator]
        sys.stdout.flush()
    except SystemExit as exit_:
        sys.stdout.flush()
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BrokenPipeError:
        code = 1
    except Exception:
        import traceback

        sys.stderr.write(f"freebsd-shim: {prog}: a bug in the shim\n")
        traceback.print_exc()
    try:
        sys.stderr.flush()
    finally:
        os._exit(code)
