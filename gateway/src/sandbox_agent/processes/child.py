"""Start processes as a user of the sandbox, and wait for them through file descriptors."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading

from sandbox_agent.failure import Failure, from_os_error, invalid_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox_agent.machine.users import User

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIECE_SIZE = 64 << 10


class StartFailure(Failure):
    """The command cannot be run. ``exit_code``: the code that a shell would report, 126 or 127."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__("invalid_argument", f"cannot run {command!r}: {error.strerror or error}")
        self.exit_code = 127 if isinstance(error, FileNotFoundError) else 126


def build_environment(user: User, *layers: dict[str, str]) -> dict[str, str]:
    """Return the environment of a new process: the variables that a login sets, updated with each of ``layers``."""
    env = {
        "PATH": os.environ.get("PATH") or DEFAULT_PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "SHELL": user.shell,
    }
    for layer in layers:
        env.update(layer)
    return env


def spawn(
    argv: list[str],
    *,
    user: User,
    env: dict[str, str],
    cwd: str,
    stdin: int,
    stdout: int,
    stderr: int,
    terminal: bool = False,
    program: str = "",
) -> subprocess.Popen[bytes]:
    """Start ``argv`` as ``user``, in a new session and process group.

    ``program``: the file to run instead of ``argv[0]``; ``terminal``: whether the three descriptors are a terminal,
    which becomes the controlling terminal. Raises StartFailure if the command cannot be run, and Failure if the user or
    the directory cannot be used.
    """
    directory = user.resolve_path(cwd)
    if not os.path.isdir(directory):
        if cwd:
            raise invalid_argument(f"the working directory {directory} does not exist: create it first")
        directory = "/"
    try:
        return subprocess.Popen(
            argv,
            executable=program or None,
            env=env,
            cwd=directory,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_set_controlling_terminal if terminal else None,
            **_build_user_arguments(user),
        )
    except OSError as error:
        if error.filename == (program or argv[0]):
            raise StartFailure(error.filename, error) from None
        raise from_os_error(error) from None
    except subprocess.SubprocessError as error:
        raise Failure("internal", f"cannot run {argv[0]!r}: {error}") from None


def _build_user_arguments(user: User) -> dict[str, Any]:
    if user.uid == os.geteuid():
        return {}
    if os.geteuid() != 0:
        raise Failure("permission_denied", f"the agent does not run as root, so it cannot run commands as {user.name}")
    return {"user": user.uid, "group": user.gid, "extra_groups": os.getgrouplist(user.name, user.gid)}


def _set_controlling_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def open_terminal(user: User, cols: int, rows: int) -> tuple[int, int]:
    """Open a terminal owned by ``user``. Returns a descriptor for the agent and one for the process."""
    agent_fd, process_fd = os.openpty()
    try:
        resize_terminal(agent_fd, cols, rows)
        user.take_ownership(process_fd)
    except OSError:
        os.close(agent_fd)
        os.close(process_fd)
        raise
    return agent_fd, process_fd


def resize_terminal(fd: int, cols: int, rows: int) -> None:
    try:
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    except struct.error:
        raise invalid_argument(
            f"the terminal size of {cols} columns and {rows} rows is not valid: use values between 0 and 65535"
        ) from None


def open_exit_descriptor(pid: int) -> int:
    """Return a descriptor that becomes readable when the process exits. The caller must still wait for the process."""
    if hasattr(os, "pidfd_open"):
        try:
            return os.pidfd_open(pid)
        except OSError:
            pass
    reader, writer = os.pipe()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(writer)

    threading.Thread(target=wait, daemon=True).start()
    return reader


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group of a process that the caller has not yet waited for."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        process.send_signal(number)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    signal_group(process, signal.SIGKILL)


def read_available(fd: int) -> bytes:
    """Return the bytes that can be read without waiting; b"" if there are none."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return (read_some(fd) or b"") if poll.poll(0) else b""


def read_some(fd: int) -> bytes | None:
    """Return available bytes; b"" at the end (EIO on a terminal), None if no bytes are available."""
    try:
        return os.read(fd, PIECE_SIZE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def drain(fds: list[int]) -> None:
    """Read each descriptor to its end, discard the data, and close the descriptor.

    Children of a process that has exited may still write to its output. Without a reader, SIGPIPE would kill them.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    open_fds = set(fds)
    while open_fds:
        for fd, _ in poll.poll():
            if read_some(fd) == b"":
                poll.unregister(fd)
                open_fds.discard(fd)
                os.close(fd)
