"""jexec(8), with the messages and order of usr.sbin/jexec/jexec.c."""

from __future__ import annotations

import _signal
import os
import sys

from shim import base, prison

USAGE = """\
usage: jexec [-l] [-d working-directory] [-u username | -U username] jail
       [command ...]"""
FORWARDED_SIGNALS = (
    _signal.SIGHUP,
    _signal.SIGINT,
    _signal.SIGQUIT,
    _signal.SIGTERM,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
    _signal.SIGALRM,
    _signal.SIGCONT,
    _signal.SIGWINCH,
)


class User:
    def __init__(self, line: list[str]) -> None:
        self.name, self.uid, self.gid = line[0], int(line[2]), int(line[3])
        self.home, self.shell = line[5], line[6] or "/bin/sh"


def find_user(name: str) -> User:
    """Return a user from /etc/passwd in the current root directory; "" means the caller. See get_user_info()."""
    try:
        with open("/etc/passwd") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) == 7 and (fields[0] == name if name else fields[2] == str(os.getuid())):
                    return User(fields)
    except OSError:
        pass
    raise base.errx(1, f"{name}: no such user" if name else f"unknown uid: {os.getuid()}")


def find_group_ids(user: User) -> list[int]:
    group_ids = [user.gid]
    try:
        with open("/etc/group") as file:
            for line in file:
                fields = line.rstrip("\n").split(":")
                if len(fields) == 4 and user.name in fields[3].split(","):
                    group_ids.append(int(fields[2]))
    except OSError:
        pass
    return group_ids


def main(argv: list[str]) -> int:
    try:
        options, arguments = base.getopt(argv, "d:lnu:U:")
    except base.BadOption:
        raise base.usage(USAGE) from None
    values = dict(options)
    clean_environment, directory = "l" in values, values.get("d", "/")
    if not arguments or ("u" in values and "U" in values):
        raise base.usage(USAGE)
    user = groups = None
    if "u" in values or (clean_environment and "U" not in values):
        user = find_user(values.get("u", ""))  # "User info from the home environment"
        groups = find_group_ids(user)
    try:
        jail = prison.find_jail(arguments[0])
    except prison.JailError as error:
        raise base.errx(1, str(error)) from None
    old_mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, FORWARDED_SIGNALS)
    child = prison.attach_to_jail(jail)
    if child:
        proxy_process(child)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, old_mask)
    try:
        os.chdir(directory)
    except OSError as error:
        raise base.err(1, f"chdir(): {directory}", error.errno or 0) from None
    if "U" in values:
        user = find_user(values["U"])  # "User info from the jail environment"
        groups = find_group_ids(user)
    if user is not None:
        switch_user(user, groups or [], clean_environment, "u" in values or "U" in values, keep_directory="d" in values)
    words = arguments[1:] or [os.environ.get("SHELL", "/bin/sh"), "-i"]
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise base.err(1, f"{'execvp' if arguments[1:] else 'execlp'}: {words[0]}", error.errno or 0) from None


def switch_user(
    user: User, groups: list[int], clean_environment: bool, switch_ids: bool, *, keep_directory: bool
) -> None:
    if clean_environment:
        term = os.environ.get("TERM")
        os.environ.clear()
        os.environ["PATH"] = "/bin:/usr/bin"
        if term is not None:
            os.environ["TERM"] = term
    if switch_ids:
        os.setgroups(groups)
        os.setgid(user.gid)
        os.setuid(user.uid)
    os.environ.update(USER=user.name, HOME=user.home, SHELL=user.shell)
    if clean_environment and not keep_directory:
        try:
            os.chdir(user.home)
        except OSError as error:
            raise base.err(1, f"chdir: {user.home}", error.errno or 0) from None


def proxy_process(child: int) -> None:
    """Forward signals to the process in the jail, and exit with its status. Never returns.

    On FreeBSD, jexec itself becomes the command. On Linux, a process cannot enter a pid namespace; only its child can.
    """
    for number in FORWARDED_SIGNALS:
        _signal.signal(number, lambda signal_number, _: forward_signal(child, signal_number))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    _, status = os.waitpid(child, 0)
    sys.stdout.flush()
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def forward_signal(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return
