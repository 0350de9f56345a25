"""Users of the sandbox: who a request is for, their home, how their paths are read, what they own."""

from __future__ import annotations

import binascii
import grp
import os
import pwd

from sandbox_agent.failure import Failure, invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.wire import Request


class User:
    def __init__(self, entry: pwd.struct_passwd) -> None:
        self.name = entry.pw_name
        self.uid = entry.pw_uid
        self.gid = entry.pw_gid
        self.home = entry.pw_dir or "/"
        self.shell = entry.pw_shell or "/bin/sh"

    def path(self, path: str) -> str:
        """``path`` made absolute: relative ones, and ``~``, start at the user's home. No path: the home."""
        if "\0" in path:
            raise invalid("a path cannot contain a NUL character")
        encodable(path)
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return os.path.normpath(os.path.join(self.home, path))

    def own(self, target: str | int) -> None:
        """Give a new file (path or descriptor) to the user, where the agent may."""
        if os.geteuid() == 0 and self.uid != 0:
            os.chown(target, self.uid, self.gid)

    def make_dirs(self, path: str) -> None:
        """Make the directory ``path`` and those above it that are missing; the user owns what was made."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for step in reversed(missing):
            try:
                os.mkdir(step)
            except FileExistsError:
                if not os.path.isdir(step):
                    raise Failure("invalid_argument", f"{step} exists and is not a directory") from None
            else:
                self.own(step)


def encodable(*texts: str) -> None:
    """Raises Failure where the system has no way to write one of them; ``\\udc80`` to ``\\udcff`` are single bytes."""
    try:
        for text in texts:
            os.fsencode(text)
    except UnicodeEncodeError:
        raise invalid("a name or an argument has half a surrogate pair in it: that is no character") from None


def named(name: str) -> User:
    """The user of that name; no name: root, or whoever the agent runs as where that is not root."""
    try:
        if name:
            return User(pwd.getpwnam(name))
        return User(pwd.getpwuid(os.geteuid()))
    except (KeyError, ValueError):
        raise Failure("unauthenticated", f"the user {name!r} does not exist in this sandbox") from None


def of_request(request: Request) -> User:
    """The user that ``Authorization: Basic base64("user:")`` names."""
    return named(_basic(request.headers.get("authorization", "")))


def _basic(header: str) -> str:
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return binascii.a2b_base64(value).decode().partition(":")[0]
    except ValueError:
        raise Failure("unauthenticated", "the Authorization header is not Basic base64(user:)") from None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
