#!/opt/sandbox/bin/python3 -ISB
"""Copy the files of an archive to their destination, as COPY in a Dockerfile does.

Arguments: the archive, which is removed; the destination; USER, UID, USER:GROUP or UID:GID, or "" for root; an octal
mode, or "" for the modes in the archive. Variables in the destination and the owner are replaced.

A source is an entry of the archive that is not inside another entry. For a directory, only its contents are copied.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import sys
import tarfile
import zlib

DIRECTORY_MODE = 0o755


class CopyError(Exception):
    """The archive cannot be copied."""


def find_owner(text: str) -> tuple[int, int]:
    user, _, group = (text or "0:0").partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        uid, gid = entry.pw_uid, entry.pw_gid
    except KeyError:
        if not user.isdigit():
            raise CopyError(f"the user {user!r} does not exist in /etc/passwd") from None
        uid = gid = int(user)
    if group:
        try:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise CopyError(f"the group {group!r} does not exist in /etc/group") from None
    return uid, gid


def normalize(name: str) -> str:
    """Return a path in the archive without "." and empty components; "" for the root. Raises CopyError."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise CopyError(f"the path {name!r} in the archive leads out of it")
    return "/".join(part for part in parts if part not in ("", "."))


def read_members(archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """Return the entries by path, each after its parent. Raises CopyError."""
    members = {}
    for member in archive:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise CopyError(f"{member.name!r} is neither a file nor a directory nor a link")
        members[normalize(member.name)] = member
    return dict(sorted(members.items()))


def find_source(name: str, members: dict[str, tarfile.TarInfo]) -> str:
    """Return the topmost entry that is or contains ``name``. Raises CopyError if a file or a link contains it."""
    source, parent = name, name
    while parent:
        parent = os.path.dirname(parent)
        if parent in members:
            if not members[parent].isdir():
                raise CopyError(f"{name!r} is inside {parent!r}, which is not a directory")
            source = parent
    return source


class Copier:
    def __init__(self, archive: tarfile.TarFile, owner: tuple[int, int], mode: int | None) -> None:
        self.archive = archive
        self.owner = owner
        self.mode = mode
        self.directories: set[str] = set()
        """Directories in the destination that exist and are not links."""
        self.files: dict[str, str] = {}
        """The copied regular files: path in the archive → path of the copy."""

    def copy(self, destination: str) -> None:
        members = read_members(self.archive)
        if not members:
            raise CopyError("the archive is empty")
        sources = {name: find_source(name, members) for name in members}
        is_directory = (
            destination.endswith("/")
            or os.path.basename(destination) in (".", "..")
            or os.path.isdir(destination)
            or len(set(sources.values())) > 1
        )
        if is_directory or members[next(iter(members))].isdir():
            base, file_name = os.path.realpath(destination), ""
        else:
            parent, file_name = os.path.split(os.path.abspath(destination))
            base = os.path.realpath(parent)
        self.make_destination(base)
        for name, member in members.items():
            source = sources[name]
            if members[source].isdir():
                relative_path = name[len(source) :].strip("/")
            else:
                relative_path = file_name or os.path.basename(name)
            if relative_path:
                self.copy_member(name, member, base, relative_path)

    def make_destination(self, path: str) -> None:
        """Create the destination and the directories above it, unless they exist."""
        missing_directories = []
        while not os.path.lexists(path):
            missing_directories.append(path)
            path = os.path.dirname(path)
        if not os.path.isdir(path):
            raise CopyError(f"{path} is not a directory")
        for each in reversed(missing_directories):
            os.mkdir(each)
            self.set_attributes(each, DIRECTORY_MODE)

    def copy_member(self, name: str, member: tarfile.TarInfo, base: str, relative_path: str) -> None:
        *parents, last_part = relative_path.split("/")
        parent = base
        for part in parents:
            parent = f"{parent}/{part}"
            self.make_directory(parent)
        path = f"{parent}/{last_part}"
        mode = stat.S_IMODE(member.mode) if self.mode is None else self.mode
        if member.isdir():
            self.make_directory(path)
            self.set_attributes(path, mode)
            return
        self.remove_file(path)
        if member.issym():
            os.symlink(member.linkname, path)
            os.chown(path, *self.owner, follow_symlinks=False)
            return
        self.write_file(member, path)
        self.files[name] = path
        self.set_attributes(path, mode)
        os.utime(path, (member.mtime, member.mtime))

    def make_directory(self, path: str) -> None:
        """Create a directory in the destination. A link in its place is not followed."""
        if path in self.directories:
            return
        try:
            os.mkdir(path)
            self.set_attributes(path, DIRECTORY_MODE)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise CopyError(f"{path} exists and is not a directory") from None
        self.directories.add(path)

    def remove_file(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            raise CopyError(f"{path} exists and is a directory") from None

    def write_file(self, member: tarfile.TarInfo, path: str) -> None:
        if member.islnk():
            target = self.files.get(normalize(member.linkname))
            if target is None:
                raise CopyError(f"{member.name!r} is a link to {member.linkname!r}, but no earlier file has this path")
            shutil.copyfile(target, path, follow_symlinks=False)
            return
        source = self.archive.extractfile(member)
        assert source is not None
        with open(path, "xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def set_attributes(self, path: str, mode: int) -> None:
        os.chown(path, *self.owner, follow_symlinks=False)
        os.chmod(path, mode)  # after the owner, because a new owner clears the bits setuid and setgid


def main(path: str, destination: str, owner: str, mode: str) -> None:
    try:
        with open(path, "rb") as file:
            os.unlink(path)
            with tarfile.open(fileobj=file) as archive:
                copier = Copier(archive, find_owner(os.path.expandvars(owner)), int(mode, 8) if mode else None)
                copier.copy(os.path.expandvars(destination))
    except (CopyError, OSError, EOFError, ValueError, OverflowError, zlib.error, tarfile.TarError) as error:
        sys.exit(f"the files cannot be copied to {destination}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
