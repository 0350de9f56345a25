"""The shared basis of the benches: a real host with a template that is built once, and progress bars."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.raw_qemu import RawQemu
from sandbox_gateway.config import Config
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources, Sandbox, Snapshot
from tests.support import session
from tests.support.live import Live
from tests.support.xfs import LoopXfs

TEMPLATE = "bench"
MEMORY_MB = 256
DISK_MB = 2048
_XFS_MB = 24 * 1024


class Steps:
    """A progress bar on standard error."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def done(self) -> None:
        self._progress.advance(self._task)


class Context:
    """The context that every bench receives.

    ``quick``: few rounds, to check that the bench works; the numbers mean little.
    """

    def __init__(self, *, quick: bool, console: Console) -> None:
        self.quick = quick
        self.console = console
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    @contextlib.contextmanager
    def steps(self, what: str, total: int) -> Iterator[Steps]:
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield Steps(progress, progress.add_task(what, total=total))

    @cached_property
    def kvm_xfs(self) -> KvmXfs:
        """Return an engine on a KVM/XFS host. It is created at first use and removed at the end."""
        return self._stack.enter_context(KvmXfs(self))


class KvmXfs:
    """An engine in this process on its own XFS, with the template TEMPLATE and default settings except for names."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> KvmXfs:
        with contextlib.ExitStack() as stack:
            directory = session.run_dir()
            xfs = stack.enter_context(LoopXfs(directory / "bench.xfs", directory / "xfs", size_mb=_XFS_MB))
            self.mount_point = xfs.mount_point
            self.config = self._configured(self.mount_point / "bench")
            self.host = KvmXfsHost(self.config)
            self.live = Live(self.host, self.config)
            stack.callback(self._close)
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _configured(self, root: Path) -> Config:
        root.mkdir(mode=0o711)
        return Config.model_validate(
            {
                "host": {"kind": "kvm_xfs", "state_root": root, "cache_root": session.cache_dir()},
                "kvm_xfs": {"uid_base": 700_000, "accelerator": os.environ.get("GROVE_TEST_ACCELERATOR", "auto")},
                "network": session.network(),
            }
        )

    def _build(self) -> None:
        self._ctx.say(f"building the template ({MEMORY_MB} MiB of memory, {DISK_MB} MiB of disk)")
        started = time.monotonic()
        recipe = Recipe(resources=Resources(memory_mb=MEMORY_MB, disk_mb=DISK_MB))
        build = self.live.do(self.live.engine.templates.build(TEMPLATE, recipe))
        lines = self.live.do(_parse_lines(build.follow()), timeout=1800)
        if build.status != "ready":
            raise RuntimeError("the template could not be built:\n" + "\n".join(lines[-20:]))
        self._ctx.say(f"built in {time.monotonic() - started:.0f} s; {self.host.platform}")

    def _close(self) -> None:
        self.live.remove_all()
        self.live.close()

    def sandbox(self, ref: str = TEMPLATE) -> Sandbox:
        made = self.live.do(self.live.engine.forks.create(ref, ForkSpec()))
        assert isinstance(made, Sandbox)
        return made

    def snapshot(self, sandbox: Sandbox) -> Snapshot:
        return self.live.do(self.live.engine.snapshots.create(sandbox.id))

    def forget(self, snapshot: Snapshot) -> None:
        self.live.do(self.live.engine.snapshots.delete(snapshot.id))

    def kill(self, *sandboxes: Sandbox) -> None:
        for sandbox in sandboxes:
            self.live.do(self.live.engine.sandboxes.delete(sandbox.id))

    @contextlib.contextmanager
    def source(self, script: str = "", *, settle: float = 3.0) -> Iterator[Snapshot]:
        """Yield a snapshot of a sandbox that runs ``script`` (Python) in the background, taken after ``settle``
        seconds.

        Removes everything except the template at the end.
        """
        try:
            sandbox = self.sandbox()
            if script:
                self.run_script(sandbox, script)
            time.sleep(settle)
            snapshot = self.snapshot(sandbox)
            self.kill(sandbox)
            yield snapshot
        finally:
            self.live.remove_all()

    def run_script(self, sandbox: Sandbox, script: str) -> None:
        command = "cat >/run/bench.py && (setsid python3 -I -S /run/bench.py </dev/null >/dev/null 2>&1 &)"
        work = self.live.engine.commands.exec(sandbox.id, ["sh", "-c", command], stdin=script.encode())
        if (result := self.live.do(work)).exit_code != 0:
            raise RuntimeError(f"the script could not be started: {result.stderr.decode(errors='replace')}")

    def raw(self, snapshot: Snapshot) -> RawQemu:
        """Return raw QEMU on ``snapshot``'s files, as the floor: ``with kvm_xfs.raw(snapshot) as raw: …``"""
        return RawQemu(self.live, self.host.platform, snapshot, self.mount_point / "raw")

    def share_templates(self, root: Path) -> None:
        """Copy the templates to another gateway on the same file system."""
        for name in ("templates", "accelerator.json"):
            source = self.config.host.state_root / name
            if source.exists():
                subprocess.run(["cp", "-a", "--reflink=always", source, root], check=True, timeout=120)


async def _parse_lines(lines: Any) -> list[str]:
    return [line async for line in lines]


def available_memory() -> int:
    """Return the bytes available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no line MemAvailable")
