"""Run engine operations, each in a separate process, and kill them midway: ``python -m tests.support.crash``.

An audit hook counts every step that has an effect outside the process, such as creating or renaming a file, issuing an
ioctl, starting a process, or sending a command to QEMU. At the requested step, the process exits immediately, as after
``kill -9``. If it does not reach that step, it exits normally, and prints the number of steps and the numbers of those
that are QMP commands, as JSON.

Each operation runs in a forked copy of a process that has already imported all modules. With arguments, the program
instead creates a scenario, prints its state to standard output, and waits until it is killed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.engine.transfer import bases
from sandbox_gateway.hosts.base import Host
from tests.support import session
from tests.support.exported_files import iterate_pieces, read_export

KILLED_EXIT_CODE = 137
_STEP_EVENTS = {
    "fcntl.ioctl",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
}


async def _claim_prewarmed_fork(engine: Engine) -> None:
    """Prewarm one fork of a snapshot, claim it, and discard the fork that was started to replace it."""
    snapshot_id = engine.snapshots.get("mark").id
    await engine.prewarm.set_target(snapshot_id, 1)
    await _wait_until_ready(engine, snapshot_id, 1)
    await engine.forks.create(snapshot_id, ForkSpec(names=["new"]))
    assert engine.machines.start_counts["prewarmed"] == 1
    await engine.prewarm.set_target(snapshot_id, 0)
    await _wait_until_ready(engine, snapshot_id, 0)


async def _wait_until_ready(engine: Engine, ref: str, count: int) -> None:
    async with asyncio.timeout(60):
        while engine.prewarm.get_level(engine.snapshots.get(ref)).ready != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _import_copy(engine: Engine, ref: str = "mark", since: str = "") -> None:
    """Export a snapshot without its memory, and import the file under another name."""
    pieces = await read_export(engine.transfers.export(ref, memory=False, since=since))
    await engine.transfers.import_(iterate_pieces(pieces), name="new")


OPERATIONS: dict[str, Any] = {
    "create": lambda engine: engine.forks.create("plain", ForkSpec(names=["new"])),
    "fork": lambda engine: engine.forks.fork("mark", ForkSpec(names=["new", "new2"])),
    "claim": _claim_prewarmed_fork,
    "capture": lambda engine: engine.snapshots.create("source", name="new"),
    "clone": lambda engine: engine.forks.clone("source", ForkSpec(names=["new"])),
    "rollback": lambda engine: engine.sandboxes.rollback("source", "mark"),
    "pause": lambda engine: engine.sandboxes.pause("source"),
    "resume": lambda engine: engine.sandboxes.resume("sleeper"),
    "kill": lambda engine: engine.sandboxes.delete("spare"),
    "delete": lambda engine: engine.snapshots.delete("spare-mark"),
    "delete-middle": lambda engine: engine.snapshots.delete("middle"),
    "import": _import_copy,
    "import-since": lambda engine: _import_copy(engine, "child", "middle"),
}


async def _import_volume_copy(engine: Engine) -> None:
    """Export a snapshot of a volume, and import the file under another name."""
    pieces = await read_export(engine.transfers.export_volume("idle", "before"))
    await engine.transfers.import_volume(iterate_pieces(pieces), name="new")


VOLUME_OPERATIONS: dict[str, Any] = {
    "volume-create": lambda engine: engine.volumes.create("new", 64),
    "volume-clone": lambda engine: engine.volumes.create("new", from_snapshot="idle@before"),
    "volume-grow": lambda engine: engine.volumes.grow("one", engine.volumes.get("one").size_mb + 32),
    "volume-capture": lambda engine: engine.volumes.create_snapshot("one", "new"),
    "volume-import": _import_volume_copy,
    "volume-rollback": lambda engine: engine.volumes.rollback("idle", "before"),
    "volume-delete": lambda engine: engine.volumes.delete("spare", with_snapshots=True),
    "attach": lambda engine: engine.attachments.attach("source", MountSpec("idle", "/idle")),
    "detach": lambda engine: engine.attachments.detach("source", "two"),
    "capture-with-volumes": lambda engine: engine.snapshots.create("source", name="new-mark", volumes=["one", "two"]),
    "fork-with-clones": lambda engine: engine.forks.fork(
        "mark", ForkSpec(names=["fork1", "fork2"], mounts=[MountSpec("one", "/one", clone=True)])
    ),
}


async def _pull_copy(engine: Engine) -> None:
    """Pull the snapshot at `team/env:mark` in the first allowed registry, and fetch every chunk."""
    bases._MAX_BASES = 0
    pull = await engine.artifacts.pull(f"{engine.config.registry.allowed[0]}/team/env:mark", name="new")
    assert pull.task is not None
    await pull.task
    assert pull.status == "ready", pull.error


ARTIFACT_OPERATIONS: dict[str, Any] = {"pull": _pull_copy}


async def _create_ten_sandboxes_with_volumes(engine: Engine) -> None:
    """Create ten sandboxes that each mount one of four volumes and a fifth one, which is read-only in most of them."""
    for number in range(5):
        await engine.volumes.create(f"v{number}", 64)
    for volume_number in range(4):
        names = [f"box{number}" for number in range(volume_number, 10, 4)]
        mounts = [MountSpec(f"v{volume_number}", "/mine"), MountSpec("v4", "/ours", read_only=volume_number > 0)]
        await engine.forks.fork("plain", ForkSpec(names=names, mounts=mounts))
        await engine.commands.exec(names[0], ["sh", "-c", f"echo v{volume_number} >/mine/who && sync"])
    await engine.commands.exec("box0", ["sh", "-c", "echo v4 >/ours/who && sync"])


SCENARIOS: dict[str, Any] = {"ten-with-volumes": _create_ten_sandboxes_with_volumes}


def read_observable_state(engine: Engine) -> Any:
    """Return, as plain data, everything about sandboxes and volumes that a restart must not change."""
    sandboxes = [each.model_dump(mode="json", exclude={"host"}) for each in engine.sandboxes.list()]
    mounts_by_volume = {
        each.name: [(sandbox.name, mount.path, mount.read_only) for sandbox, mount in engine.volumes.list_mounts(each)]
        for each in engine.volumes.list()
    }
    volumes = [each.model_dump(mode="json") for each in engine.volumes.list()]
    return json.loads(
        json.dumps([sandboxes, volumes, {name: sorted(mounts) for name, mounts in mounts_by_volume.items()}])
    )


class ScenarioProcess:
    """A separate process whose engine creates a scenario and then waits to be killed."""

    def __init__(self, config: Config, host_class: str, scenario: str, path: Path) -> None:
        path.write_text(config.model_dump_json())
        self._error_log = path.with_suffix(".log").open("w+")
        argv = [sys.executable, "-m", "tests.support.crash", str(path), host_class, scenario]
        self._process = subprocess.Popen(
            argv, cwd=session.REPOSITORY, stdout=subprocess.PIPE, stderr=self._error_log, text=True
        )

    def __enter__(self) -> ScenarioProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._error_log.close()

    def read_state(self, seconds: float) -> Any:
        """Wait until the scenario has been created, and return its observable state."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], seconds)[0], "the scenario was not ready in time"
        line = self._process.stdout.readline()
        self._error_log.seek(0)
        assert line, self._error_log.read()[-3000:]
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


class OperationRunner:
    """Runs operations, each in a separate process."""

    def __init__(self, host_class: str) -> None:
        self._host_class = host_class
        self._process: subprocess.Popen[str] | None = None

    def run(self, config: Config, operation: str, fatal_step: int, output: Path) -> int:
        """Run an operation whose process is killed at the step ``fatal_step``, and return the process's exit code.

        The exit code is KILLED_EXIT_CODE if the process reaches that step, 0 if the operation finishes before it, or
        another code if the operation fails. The process writes its output to the file ``output``.
        """
        if self._process is None:
            argv = [sys.executable, "-m", "tests.support.crash"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                argv, cwd=session.REPOSITORY, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        assert self._process.stdin and self._process.stdout
        request = [config.model_dump_json(), self._host_class, operation, fatal_step, str(output)]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 300)[0], f"{operation} did not end"
        return int(self._process.stdout.readline())

    def end(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=30)
            except subprocess.TimeoutExpired:  # also kill a hung operation
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(30)
            self._process = None


class StepCounter:
    """Counts the steps of this process, and ends the process at the step ``fatal_step``."""

    def __init__(self, fatal_step: int) -> None:
        self._fatal_step = fatal_step
        self.count = 0
        self.qmp_steps: list[int] = []
        """The numbers of the steps that are commands to QEMU."""
        self.is_armed = False

    def on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STEP_EVENTS or (event == "open" and _opens_for_writing(arguments)):
            self._count_step()

    def watch_qmp(self) -> None:
        execute = QMPClient.execute

        async def execute_as_step(client: QMPClient, command: str, *args: Any, **kwargs: Any) -> Any:
            if not command.startswith("query-") and self._count_step():
                self.qmp_steps.append(self.count)
            return await execute(client, command, *args, **kwargs)

        QMPClient.execute = execute_as_step  # type: ignore[method-assign]

    def _count_step(self) -> bool:
        if self.is_armed:
            self.count += 1
            if self.count == self._fatal_step:
                os._exit(KILLED_EXIT_CODE)
        return self.is_armed


def _opens_for_writing(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


async def _run_operation(host: Host, config: Config, operation: str, step_counter: StepCounter) -> None:
    engine = Engine(host, config)
    await engine.open()
    step_counter.is_armed = True
    await (OPERATIONS | VOLUME_OPERATIONS | ARTIFACT_OPERATIONS)[operation](engine)
    step_counter.is_armed = False
    await engine.close()


async def _run_scenario(host: Host, config: Config, scenario: str) -> None:
    engine = Engine(host, config)
    await engine.open()
    await SCENARIOS[scenario](engine)
    print(json.dumps(read_observable_state(engine)), flush=True)
    await asyncio.Event().wait()


def _make_host(host_class: str, config: Config) -> Host:
    module, _, name = host_class.rpartition(".")
    host: Host = getattr(importlib.import_module(module), name)(config)
    return host


def _run_once(config: Config, host_class: str, operation: str, fatal_step: int) -> None:
    host = _make_host(host_class, config)
    step_counter = StepCounter(fatal_step)
    sys.addaudithook(step_counter.on_audit)
    step_counter.watch_qmp()
    asyncio.run(_run_operation(host, config, operation, step_counter))
    print(json.dumps({"steps": step_counter.count, "qmp": step_counter.qmp_steps}), flush=True)


def _serve_requests() -> None:
    for line in sys.stdin:
        config, host_class, operation, fatal_step, output = json.loads(line)
        importlib.import_module(host_class.rpartition(".")[0])
        if (child := os.fork()) == 0:
            with Path(output).open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            with Path("/dev/null").open() as null_device:
                os.dup2(null_device.fileno(), 0)
            try:
                _run_once(Config.model_validate_json(config), host_class, operation, fatal_step)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    if len(sys.argv) == 1:
        _serve_requests()
        return
    path, host_class, scenario = sys.argv[1:]
    config = Config.model_validate_json(Path(path).read_text())
    asyncio.run(_run_scenario(_make_host(host_class, config), config, scenario))


if __name__ == "__main__":
    main()
