"""Run tests on OpenZFS in User-Mode Linux: ``python -m tests.openzfs [STEP…] [-- COMMAND…]``."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.template import apt
from tests import leaks
from tests.openzfs import guest, image, steps
from tests.openzfs.steps import Outcome, Step
from tests.support import jail_world, session

_BOOT_SECONDS = 600
_EXTRA_SECONDS = 120
"""How much longer than a step's deadline the host waits. The guest itself stops the step, unless its kernel is hung."""
_COMMAND_SECONDS = 3600
_MEMORY_MB = 5120
_GUEST_STATE = "/var/tmp/grove"
_JOB_DISK, _ENVIRONMENT_DISK, _RESULTS_DISK = "job.img", "environment.img", "results.tar"
_RESULTS_MEGABYTES = 256
_ARC_MEGABYTES = 256
"""The size of ZFS's cache. The guest has little memory, and the jails need it."""
_start_time = time.monotonic()


def main(arguments: list[str]) -> int:
    names, command = _split_arguments(arguments)
    try:
        selected_steps = [Step("command", tuple(command), _COMMAND_SECONDS)] if command else steps.select_steps(names)
    except ValueError as error:
        print(f"./dev test openzfs: {error}", file=sys.stderr)
        return 2
    # End the guest even if this process is terminated.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    leaks.sweep_earlier_runs()
    try:
        outcomes = run(selected_steps)
    finally:
        shutil.rmtree(session.get_run_path(), ignore_errors=True)
    for outcome in outcomes:
        report(str(outcome))
    return 0 if all(outcome.is_success for outcome in outcomes) else 1


def _split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    position = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:position], arguments[position + 1 :]


def report(line: str) -> None:
    print(f"[{time.monotonic() - _start_time:6.0f} s] {line}", flush=True)


def run(selected_steps: Sequence[Step]) -> list[Outcome]:
    """Run the steps in one guest, and return their outcomes. Their files are left in ``get_results_directory``."""
    directory, results = session.get_run_dir(), get_results_directory()
    guest_image = image.find_or_build_image(directory, report)
    versions = guest_image.versions
    report(f"OpenZFS {versions[image.ZFS_PACKAGE]}, Linux {versions[image.KERNEL_PACKAGE]}")
    report("writing the disks of the job")
    _write_disks(selected_steps, directory)
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    report(f"starting the guest; its console is also in {results}/console.log")
    argv = make_guest_command(guest_image, directory)
    with (results / "console.log").open("w") as log, Console(argv, directory) as console:
        statuses = follow_output(console.read_line, selected_steps, log.write)
    extract_results(directory / _RESULTS_DISK, results)
    return [
        Outcome(step, status, seconds, steps.count_results(results / step.result) if step.result else {})
        for step in selected_steps
        for status, seconds in [statuses.get(step.name, (None, 0.0))]
    ]


def extract_results(disk: Path, directory: Path) -> None:
    """Write the files of an archive into ``directory``, without their folders. (Python 3.11.2 has no tar filters.)"""
    with tarfile.open(disk, "r:") as archive:
        # Without results, the disk contains only zeros, which tar reads as an empty archive.
        for member in archive:
            if member.isfile() and (content := archive.extractfile(member)):
                (directory / Path(member.name).name).write_bytes(content.read())


def get_results_directory() -> Path:
    return session.get_state_dir() / "openzfs"


def follow_output(
    read_line: Callable[[float], str | None], selected_steps: Sequence[Step], write: Callable[[str], object]
) -> dict[str, tuple[int | None, float]]:
    """Report what the guest prints until it turns itself off. Returns the status and duration of each finished step.

    ``read_line`` takes a deadline, and returns None at the end of the output. It raises TimeoutError.
    """
    seconds_by_name = {step.name: step.seconds for step in selected_steps}
    statuses: dict[str, tuple[int | None, float]] = {}
    deadline = time.monotonic() + _BOOT_SECONDS
    try:
        while (line := read_line(deadline)) is not None:
            write(f"{line}\n")
            report(line)
            match line.split():
                case [guest.MARKER, "start", name]:
                    deadline = time.monotonic() + seconds_by_name[name] + _EXTRA_SECONDS
                case [guest.MARKER, "end", name, status, seconds]:
                    statuses[name] = int(status), float(seconds)
                    deadline = time.monotonic() + _EXTRA_SECONDS
    except TimeoutError:
        report("the guest does not respond: it is stopped")
    return statuses


class Console:
    """A context manager that starts a guest, and kills it at the end."""

    def __init__(self, argv: Sequence[str], directory: Path) -> None:
        self._argv = argv
        self._directory = directory
        self._rest = b""

    def __enter__(self) -> Console:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)

    def read_line(self, deadline: float) -> str | None:
        """Return the next line of the console, or None if the guest has exited. Raises TimeoutError at the deadline."""
        assert self._process.stdout is not None
        while b"\n" not in self._rest:
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")


def make_guest_command(guest_image: image.Image, directory: Path) -> list[str]:
    """Return a command for the working directory ``directory``."""
    memory = directory / "memory"
    memory.mkdir()
    # The guest's memory is a file in TMPDIR, which must be a tmpfs without noexec. /dev/shm is too small in many
    # containers.
    mount_command = f"mount -t tmpfs -o size={_MEMORY_MB + 64}m tmpfs memory"
    return [
        # The kernel must not be the first process of its namespace, which cannot abort: it would hang after a panic.
        *(*image.ISOLATION, "sh", "-c", f'{mount_command} && "$@"; exit', "sh"),
        *("env", f"TMPDIR={memory}", str(guest_image.kernel)),
        *(f"mem={_MEMORY_MB}M", "uml_dir=./", "noreboot", "con=null", "con0=null,fd:1", "ssl=null"),
        # Changes of the image are written to another file. Names relative to the working directory contain no commas.
        f"ubd0=changes,{os.path.relpath(guest_image.disk, directory)}",
        *(f"ubd1={_JOB_DISK}", f"ubd2r={_ENVIRONMENT_DISK}", f"ubd3={_RESULTS_DISK}"),
        *("root=/dev/ubda", "rw", "init=/usr/local/sbin/openzfs-init"),
        *("quiet", "loglevel=4", f"zfs.zfs_arc_max={_ARC_MEGABYTES << 20}"),
    ]


def _write_disks(selected_steps: Sequence[Step], directory: Path) -> None:
    tree = directory / "job"
    repository, cache = tree / "repository", tree / "cache"
    for path in (repository, cache):
        path.mkdir(parents=True)
    _copy_repository(repository)
    session.link_collection(repository)
    # Every process of the tests would otherwise compile the same modules.
    compile_command = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-s", str(repository)]
    compile_command += ["-p", str(session.REPOSITORY), str(repository / "gateway"), str(repository / "tests")]
    subprocess.run(compile_command, timeout=300, check=True)
    # The guest has no network, and would take a long time to build the root file system of the jails.
    tarball = jail_world.get_debian_tarball()
    shutil.copy(tarball, cache)
    job = {
        "repository": str(session.REPOSITORY),
        "state": _GUEST_STATE,
        "apt_sources": apt.read_host_sources(image.SUITE),
        "environment": {
            "GROVE_TEST_STATE": _GUEST_STATE,
            "PATH": f"{session.REPOSITORY}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED": "1",
        },
        "steps": [{"name": step.name, "argv": step.argv, "seconds": step.seconds} for step in selected_steps],
    }
    (tree / "job.json").write_text(json.dumps(job))
    shutil.copy(guest.__file__, tree)
    image.make_disk(directory / _JOB_DISK, tree, free_megabytes=1024)
    shutil.rmtree(tree)
    image.make_disk(directory / _ENVIRONMENT_DISK, session.REPOSITORY / ".venv", free_megabytes=0)
    with (directory / _RESULTS_DISK).open("wb") as file:
        file.truncate(_RESULTS_MEGABYTES << 20)


def _copy_repository(target: Path) -> None:
    """Copy the files of the repository, except the files that Git ignores."""
    git = ["git", "-c", "safe.directory=*", "-C", str(session.REPOSITORY)]
    argv = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, capture_output=True, timeout=60, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source = session.REPOSITORY / name
        if source.is_symlink() or source.is_file():  # A removed file is still in the index.
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
