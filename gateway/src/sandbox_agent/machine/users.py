"""Find the user of a request, resolve the user's paths, and set the owners of files."""

from __future__ import annotations

import binascii
import grp
import os
import pwd

from sandbox_agent.failure import Failure, invalid_argument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.http.wire import Request


class User:
    def __init__(self, entry: pwd.struct_passwd) -> None:
        self.name = entry.pw_name
        self.uid = entry.pw_uid
        self.gid = entry.pw_gid
        self.home = entry.pw_dir or "/"
        self.shell = entry.pw_shell or "/bin/sh"

    def resolve_path(self, path: str) -> str:
        """Return ``path`` as an absolute path. Relative paths, "" and ``~`` refer to the user's home directory."""
        if "\0" in path:
            raise invalid_argument("a path cannot contain a NUL character")
        require_encodable(path)
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return os.path.normpath(os.path.join(self.home, path))

    def take_ownership(self, target: str | int) -> None:
        """Make the user the owner of the new file ``target`` (a path or a descriptor) if the agent runs as root."""
        if os.geteuid() == 0 and self.uid != 0:
            os.chown(target, self.uid, self.gid)

    def make_dirs(self, path: str) -> None:
        """Create the directory ``path`` and its missing parents; the user owns the new directories."""
        missing_directories = []
        while not os.path.isdir(path):
            missing_directories.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for directory in reversed(missing_directories):
            try:
                os.mkdir(directory)
            except FileExistsError:
                if not os.path.isdir(directory):
                    raise Failure("invalid_argument", f"{directory} exists and is not a directory") from None
            else:
                self.take_ownership(directory)


def require_encodable(*texts: str) -> None:
    """Raise Failure if any of ``texts`` cannot be encoded for the file system.

    ``\\udc80`` to ``\\udcff`` are allowed: each represents a single byte.
    """
    try:
        for text in texts:
            os.fsencode(text)
    except UnicodeEncodeError:
        raise invalid_argument("a name or an argument contains an unpaired surrogate: remove it") from None


def find_user(name: str) -> User:
    """Return the user called ``name``. If ``name`` is "", return the user that the agent runs as, normally root."""
    try:
        if name:
            return User(pwd.getpwnam(name))
        return User(pwd.getpwuid(os.geteuid()))
    except (KeyError, ValueError):
        raise Failure("unauthenticated", f"the user {name!r} does not exist in this sandbox") from None


def find_request_user(request: Request) -> User:
    """Return the user that the Authorization header names, or the default user if it names none."""
    return find_user(_parse_user_name(request.headers.get("authorization", "")))


def _parse_user_name(header: str) -> str:
    """Return the user name in ``Basic base64("NAME:")``, or "" for any other scheme. Raises Failure."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return binascii.a2b_base64(value).decode().partition(":")[0]
    except ValueError:
        raise Failure(
            "unauthenticated", 'invalid Authorization header: send "Basic " and the base64 encoding of "USER:"'
        ) from None


def find_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def find_group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
