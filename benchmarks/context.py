"""Provide what all benches need: a real host with a template that is built once, and progress bars."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.raw_qemu import RawQemu
from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources, Sandbox, Snapshot
from tests.support import session
from tests.support.live import EngineRunner
from tests.support.xfs import LoopXfs

TEMPLATE = "bench"
MEMORY_MB = 256
DISK_MB = 2048
_XFS_MB = 24 * 1024


class Steps:
    """A progress bar on standard error. Call ``advance`` after each step."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self) -> None:
        self._progress.advance(self._task)


class Context:
    """The settings and resources that every bench receives.

    ``quick``: whether to run only a few rounds, to check that the benches work. The results are then not meaningful.
    """

    def __init__(self, *, quick: bool, console: Console) -> None:
        self.quick = quick
        self.console = console
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def choose(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def print_progress(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    @contextlib.contextmanager
    def showing_progress(self, description: str, total: int) -> Iterator[Steps]:
        """Show a progress bar inside this context."""
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield Steps(progress, progress.add_task(description, total=total))

    @cached_property
    def kvm_xfs(self) -> KvmXfs:
        """An engine on a KVM/XFS host, which is created on first use and removed at the end."""
        return self._stack.enter_context(KvmXfs(self))


class KvmXfs:
    """An engine in this process on a separate XFS file system, with the template TEMPLATE.

    It has the default settings, except for paths, user ids and the network.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> KvmXfs:
        with contextlib.ExitStack() as stack:
            directory = session.get_run_dir()
            xfs = stack.enter_context(LoopXfs(directory / "bench.xfs", directory / "xfs", size_mb=_XFS_MB))
            self.mount_point = xfs.mount_point
            self.config = self.create_config(self.mount_point / "bench")
            self.host = KvmXfsHost(self.config)
            self.live = EngineRunner(self.host, self.config)
            stack.callback(self._close)
            self._build_template()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def create_config(self, root: Path) -> Config:
        """Create the state root of a gateway, and return its configuration."""
        root.mkdir(mode=0o711)
        return Config.model_validate(
            {
                "host": {"kind": "kvm_xfs", "state_root": root, "cache_root": session.get_cache_dir()},
                "kvm_xfs": {"uid_base": 700_000, "accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
                "network": session.allocate_network(),
            }
        )

    def _build_template(self) -> None:
        self._ctx.print_progress(f"building the template ({MEMORY_MB} MiB of memory, {DISK_MB} MiB of disk)")
        start_time = time.monotonic()
        recipe = Recipe(resources=Resources(memory_mb=MEMORY_MB, disk_mb=DISK_MB))
        build = self.live.do(self.live.engine.templates.build(TEMPLATE, recipe))
        lines = self.live.follow(build, timeout=1800)
        if build.status != "ready":
            raise RuntimeError("the template could not be built:\n" + "\n".join(lines[-20:]))
        self._ctx.print_progress(f"built in {time.monotonic() - start_time:.0f} s; {self.host.platform}")

    def _close(self) -> None:
        self.live.remove_all()
        self.live.close()

    def create_sandbox(self, ref: str = TEMPLATE) -> Sandbox:
        sandbox = self.live.do(self.live.engine.forks.create(ref, ForkSpec()))
        assert isinstance(sandbox, Sandbox)
        return sandbox

    def capture(self, sandbox: Sandbox) -> Snapshot:
        return self.live.do(self.live.engine.snapshots.create(sandbox.id))

    def delete_snapshot(self, snapshot: Snapshot) -> None:
        self.live.do(self.live.engine.snapshots.delete(snapshot.id))

    def delete_sandboxes(self, *sandboxes: Sandbox) -> None:
        for sandbox in sandboxes:
            self.live.do(self.live.engine.sandboxes.delete(sandbox.id))

    @contextlib.contextmanager
    def temporary_snapshot(self, script: str = "", *, settle_seconds: float = 3.0) -> Iterator[Snapshot]:
        """Yield a snapshot of a sandbox in which the Python program ``script`` has run for ``settle_seconds``.

        The program runs in the background. At the end, removes everything except the template.
        """
        try:
            sandbox = self.create_sandbox()
            if script:
                self.run_script(sandbox, script)
            time.sleep(settle_seconds)
            snapshot = self.capture(sandbox)
            self.delete_sandboxes(sandbox)
            yield snapshot
        finally:
            self.live.remove_all()

    def run_script(self, sandbox: Sandbox, script: str) -> None:
        command = "cat >/run/bench.py && (setsid python3 -I -S /run/bench.py </dev/null >/dev/null 2>&1 &)"
        execution = self.live.engine.commands.exec(sandbox.id, ["sh", "-c", command], stdin=script.encode())
        if (result := self.live.do(execution)).exit_code != 0:
            raise RuntimeError(f"the script could not be started: {result.stderr.decode(errors='replace')}")

    def raw_qemu(self, snapshot: Snapshot) -> RawQemu:
        """Return a context manager that runs QEMU without a gateway on the files of ``snapshot``, for the floor."""
        return RawQemu(self.live, self.host.platform, snapshot, self.mount_point / "raw")

    def copy_templates(self, root: Path) -> None:
        """Copy the templates to the state root of another gateway on the same file system."""
        for name in ("templates", "accelerator.json"):
            source = self.config.host.state_root / name
            if source.exists():
                subprocess.run(["cp", "-a", "--reflink=always", source, root], check=True, timeout=120)


def read_available_memory_bytes() -> int:
    """Return how many bytes of memory are available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable line")


def create_busy_program(megabytes: int, *, pause_seconds: float) -> str:
    """Return a Python program whose working set does not grow: it rewrites the same memory with new contents."""
    return f"""
import ctypes, time
size = {megabytes} << 20
memory = ctypes.create_string_buffer(size)
count = 0
while True:
    count += 1
    ctypes.memset(memory, count % 255 + 1, size)
    time.sleep({pause_seconds})
"""
