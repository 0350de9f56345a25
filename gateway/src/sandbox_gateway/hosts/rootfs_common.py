"""Functions that all kinds of host use to build a template's root file system.

Files in a foreign tree are read, never executed. Paths in the tree are resolved as in the sandbox: a symbolic link to
`/etc` resolves to the sandbox's `/etc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path, PurePosixPath

from sandbox_gateway.command import build_child_environment, format_missing_program_message, run_async
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.hosts import tree_removal
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.tasks import finish_despite_cancellation

AGENT_DIRECTORY = "/opt/sandbox_agent"
HOME = "/home/user"
STEP_TIMEOUT_SECONDS = 3600.0
_MAX_FILE_BYTES = 1 << 20
_MAX_SKELETON_FILES = 100


class Tree:
    """A guest's root directory. Paths are absolute, as seen by the guest, and cannot lead outside the directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve(self, path: str, *, follow: bool = True) -> Path:
        """Return the path on the host, with symbolic links resolved inside the tree.

        ``follow``: also resolve the last component. Raises Invalid if symbolic links form a loop.
        """
        remaining_parts = deque(PurePosixPath(path).parts)
        host_path = self.root
        followed_link_count = 0
        while remaining_parts:
            part = remaining_parts.popleft()
            if part in ("/", "."):
                continue
            if part == "..":
                host_path = host_path if host_path == self.root else host_path.parent
                continue
            entry = host_path / part
            if entry.is_symlink() and (remaining_parts or follow):
                followed_link_count += 1
                if followed_link_count > 40:
                    raise Invalid(f"the root file system has a loop of symbolic links at {path}: remove the loop")
                target = PurePosixPath(entry.readlink())
                if target.is_absolute():
                    host_path = self.root
                remaining_parts.extendleft(reversed(target.parts))
                continue
            host_path = entry
        return host_path

    def is_file(self, path: str) -> bool:
        return self.resolve(path).is_file()

    def is_dir(self, path: str) -> bool:
        return self.resolve(path).is_dir()

    def list_directory(self, path: str) -> list[str]:
        """Return the sorted names of a directory's entries, or an empty list if ``path`` is not a directory."""
        host_path = self.resolve(path)
        return sorted(entry.name for entry in host_path.iterdir()) if host_path.is_dir() else []

    def read(self, path: str) -> str:
        """Return a file's text, or "" if ``path`` is not a file. Raises Invalid if the file is too large."""
        return self.read_bytes(path).decode(errors="replace")

    def read_bytes(self, path: str) -> bytes:
        """Return a file's contents, or b"" if ``path`` is not a file. Raises Invalid if the file is too large."""
        host_path = self.resolve(path)
        if not host_path.is_file():
            return b""
        with host_path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise Invalid(
                f"the root file system's {path} is larger than {_MAX_FILE_BYTES} bytes: make the file smaller"
            )
        return data

    def mkdir(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        """Create a directory, and its missing parents. Raises Invalid if any of them is a file."""
        host_path = self.resolve(path)
        missing_directories = [directory for directory in (host_path, *host_path.parents) if not directory.is_dir()]
        for directory in reversed(missing_directories):
            try:
                directory.mkdir()
            except FileExistsError:
                raise Invalid(
                    f"the root file system has a file at /{directory.relative_to(self.root)}, where the gateway needs "
                    "a directory: remove the file"
                ) from None
            directory.chmod(mode if directory == host_path else 0o755)  # Independent of the umask.
        if missing_directories:
            os.chown(host_path, owner, owner)

    def write(self, path: str, content: str | bytes, mode: int = 0o644, owner: int = 0) -> None:
        """Write a regular file. Replaces a file, link or directory at ``path``, but never changes a link's target."""
        host_path = self._clear_path(path)
        with host_path.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chown(host_path, owner, owner)
        host_path.chmod(mode)

    def link(self, path: str, target: str) -> None:
        self._clear_path(path).symlink_to(target)

    def remove(self, path: str) -> None:
        self._clear_path(path)

    def _clear_path(self, path: str) -> Path:
        """Create the parent of ``path`` and remove the entry at ``path``. Returns the path on the host."""
        self.mkdir(str(PurePosixPath(path).parent))
        host_path = self.resolve(path, follow=False)
        if host_path.is_dir() and not host_path.is_symlink():
            tree_removal.remove_tree(host_path)
        else:
            host_path.unlink(missing_ok=True)
        return host_path


def find_python_minor_version(tree: Tree, name: str) -> int | None:
    if match := re.fullmatch(r"python3\.(\d+)", name):
        return int(match[1])
    entry_names = [*tree.list_directory("/usr/lib"), *tree.list_directory("/usr/lib64")]
    minor_versions = [
        int(match[1]) for entry_name in entry_names if (match := re.fullmatch(r"python3\.(\d+)", entry_name))
    ]
    return max(minor_versions, default=None)


def find_agent_package() -> Path:
    spec = importlib.util.find_spec("sandbox_agent")
    if spec is None or not spec.submodule_search_locations:
        raise BackendFailed("the gateway's sandbox_agent package is missing: reinstall the gateway")
    return Path(next(iter(spec.submodule_search_locations)))


def install_agent(tree: Tree, agent: Path) -> None:
    """Install the agent's modules in AGENT_DIRECTORY. ``agent`` is the directory of the agent's package."""
    tree.remove(AGENT_DIRECTORY)
    for source in sorted(agent.rglob("*")):
        if source.suffix == ".py" and source.is_file():
            tree.write(f"{AGENT_DIRECTORY}/{source.relative_to(agent)}", source.read_text())


async def compile_agent_in_foreign_tree(root: Path, log: Log) -> None:
    """Compile the agent in a foreign tree, whose programs must not run on the host.

    Uses the gateway's interpreter, which must have the same version as the tree's.
    """
    directory = str(Tree(root).resolve(AGENT_DIRECTORY))
    await compile_agent([sys.executable, "-I"], ["-s", directory, "-p", AGENT_DIRECTORY, directory], log)


async def compile_agent(python: Sequence[str], arguments: Sequence[str], log: Log) -> None:
    """Compile the agent to bytecode, so that it starts faster. The agent does not write bytecode at run time."""
    compileall_options = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
    result = await run_async([*python, *compileall_options, *arguments], timeout=120, check=False)
    if result.returncode != 0:
        log(
            "the agent could not be byte-compiled and starts more slowly: "
            f"{(result.stderr or result.stdout).strip()[-300:]}"
        )


def find_free_uid(tree: Tree, user_file: str = "/etc/passwd") -> int | None:
    """Return an unused id for the user `user`, or None if the tree has a user or group with that name."""
    accounts = [line.split(":") for file in (user_file, "/etc/group") for line in tree.read(file).splitlines()]
    if any(account[0] == "user" for account in accounts):
        return None
    used_ids = {account[2] for account in accounts if len(account) > 2}
    return next(number for number in range(1000, 60000) if str(number) not in used_ids)


def add_user(tree: Tree) -> None:
    """Add the user `user`, as in E2B's images, unless the tree already has a user or group with that name.

    If `sudo` is installed, allow `user` to run any command with it.
    """
    uid = find_free_uid(tree)
    if uid is not None:
        shell = "/bin/bash" if tree.is_file("/bin/bash") else "/bin/sh"
        _append_line(tree, "/etc/passwd", f"user:x:{uid}:{uid}::{HOME}:{shell}", 0o644)
        _append_line(tree, "/etc/group", f"user:x:{uid}:", 0o644)
        _append_line(tree, "/etc/shadow", "user:*:19000:0:99999:7:::", 0o640)
        _append_line(tree, "/etc/gshadow", "user:!::", 0o640)
        create_home(tree, uid, "/etc/skel")
    if tree.is_file("/usr/bin/sudo"):
        tree.write("/etc/sudoers.d/sandbox", "user ALL=(ALL:ALL) NOPASSWD: ALL\n", mode=0o440)


def create_home(tree: Tree, uid: int, skeleton: str) -> None:
    """Create the home directory of `user` from the files in the directory ``skeleton``, unless it exists.

    Raises Invalid if there are too many files: hard links to one file take up no space, but copies of them do.
    """
    if tree.is_dir(HOME):
        return
    tree.mkdir(HOME, owner=uid)
    file_count = byte_count = 0
    for name in tree.list_directory(skeleton):
        if not tree.is_file(f"{skeleton}/{name}"):
            continue
        data = tree.read_bytes(f"{skeleton}/{name}")
        file_count += 1
        byte_count += len(data)
        if file_count > _MAX_SKELETON_FILES or byte_count > _MAX_FILE_BYTES:
            raise Invalid(
                f"the root file system's {skeleton} has more than {_MAX_SKELETON_FILES} files or {_MAX_FILE_BYTES} "
                "bytes: remove some of its files"
            )
        target = re.sub(r"^dot\.", ".", name)  # FreeBSD's files have names such as dot.profile.
        tree.write(f"{HOME}/{target}", data, owner=uid)


def _append_line(tree: Tree, path: str, line: str, mode: int) -> None:
    host_path = tree.resolve(path)
    if path.endswith("shadow") and not host_path.is_file():
        return
    old_text = tree.read(path)
    gid = host_path.stat().st_gid if host_path.is_file() else 0
    tree.write(path, f"{old_text}{'' if not old_text or old_text.endswith(chr(10)) else chr(10)}{line}\n", mode)
    os.chown(tree.resolve(path), 0, gid)


def to_gateway_error(error: OSError, action: str) -> Exception:
    if error.errno == errno.ENOSPC:
        return NoSpace(
            f"{action} failed because the host's disk is full ({error.filename}): free some space and build "
            "the template again"
        )
    return BackendFailed(f"{action} failed: {error}")


async def remove_tree_in_thread(path: Path) -> None:
    """Remove a directory with everything in it, as far as possible. Even a cancelled build waits for that."""
    await finish_despite_cancellation(asyncio.to_thread(tree_removal.remove_tree, path, ignore_errors=True))


def find_file_kind(path: Path) -> str:
    return "directory" if path.is_dir() else "file" if path.is_file() else ""


async def run_logged(
    argv: Sequence[str],
    log: Log,
    *,
    should_log: Callable[[str], bool] = lambda line: True,
    env: dict[str, str] | None = None,
    timeout: float = STEP_TIMEOUT_SECONDS,
) -> None:
    """Run ``argv`` and pass its output to ``log``, line by line. On return, all its processes have exited."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=build_child_environment(**(env or {})),
            start_new_session=True,
        )
    except FileNotFoundError:
        raise BackendFailed(format_missing_program_message(argv[0])) from None
    tail: deque[str] = deque(maxlen=60)
    try:
        async with asyncio.timeout(timeout):
            assert process.stdout is not None
            async for line in _read_lines(process.stdout):
                tail.append(line)
                if should_log(line):
                    log(line)
            await process.wait()
    except TimeoutError:
        raise BackendFailed(
            f"{argv[0]} did not finish within {timeout:g} s and was killed: build the template again"
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise _create_step_error(argv, process.returncode, list(tail))


async def _read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    remainder = b""
    while chunk := await stream.read(65536):
        *lines, remainder = re.split(rb"[\r\n]", remainder + chunk)
        for line in lines:
            if line.strip():
                yield line.decode(errors="replace").rstrip()
        remainder = remainder[-65536:]
    if remainder.strip():
        yield remainder.decode(errors="replace").rstrip()


def _create_step_error(argv: Sequence[str], code: int, tail: list[str]) -> Exception:
    if any("No space left on device" in line for line in tail):
        return NoSpace(
            f"{argv[0]} failed because the host's disk is full: free some space and build the template again"
        )
    error_lines = [line for line in tail if line.startswith("E: ")] or tail[-5:]
    program = "mmdebstrap" if "mmdebstrap" in argv else argv[0]
    return BackendFailed(f"{program} failed ({code}): {' '.join(error_lines)[-1500:] or 'no message'}")
