"""Run verbs of an engine, each in a separate process, and die in the middle: ``python -m tests.support.crash``.

An audit hook counts every step that changes the world outside the process (a file created, linked, renamed, removed, an
ioctl, a new process, a command to QEMU); at the requested step the process dies at once, as by ``kill -9``. Without
such a step it ends normally and prints, as JSON, the number of steps and which of them are commands to QEMU.

Verbs are run by copies (``fork``) of a process that has imported everything and reads the verb's name. With arguments,
it creates a scene instead, describes it on standard output, and waits until it is killed.
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
from sandbox_gateway.hosts.base import Host
from tests.support import session

KILLED = 137
_CHANGES = {
    "fcntl.ioctl",
    "os.chmod",
    "os.link",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
}


async def _claim(engine: Engine) -> None:
    """Keep one fork of a snapshot ready, claim it, and end the one that takes its place."""
    mark = engine.snapshots.get("mark").id
    await engine.prewarm.set_target(mark, 1)
    await _until_ready(engine, mark, 1)
    await engine.forks.create(mark, ForkSpec(names=["new"]))
    assert engine.prewarm.claimed == 1
    await engine.prewarm.set_target(mark, 0)
    await _until_ready(engine, mark, 0)


async def _until_ready(engine: Engine, ref: str, count: int) -> None:
    async with asyncio.timeout(60):
        while engine.prewarm.level(engine.snapshots.get(ref)).ready != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


VERBS: dict[str, Any] = {
    "create": lambda engine: engine.forks.create("plain", ForkSpec(names=["new"])),
    "fork": lambda engine: engine.forks.fork("mark", ForkSpec(names=["new", "new2"])),
    "claim": _claim,
    "capture": lambda engine: engine.snapshots.create("source", name="new"),
    "clone": lambda engine: engine.forks.clone("source", ForkSpec(names=["new"])),
    "rollback": lambda engine: engine.sandboxes.rollback("source", "mark"),
    "pause": lambda engine: engine.sandboxes.pause("source"),
    "resume": lambda engine: engine.sandboxes.resume("sleeper"),
    "kill": lambda engine: engine.sandboxes.delete("spare"),
    "delete": lambda engine: engine.snapshots.delete("spare-mark"),
}

VOLUME_VERBS: dict[str, Any] = {
    "volume-create": lambda engine: engine.volumes.create("new", 64),
    "volume-clone": lambda engine: engine.volumes.create("new", from_snapshot="idle@before"),
    "volume-grow": lambda engine: engine.volumes.grow("one", engine.volumes.get("one").size_mb + 32),
    "volume-capture": lambda engine: engine.volumes.create_snapshot("one", "new"),
    "volume-rollback": lambda engine: engine.volumes.rollback("idle", "before"),
    "volume-delete": lambda engine: engine.volumes.delete("spare", with_snapshots=True),
    "attach": lambda engine: engine.attachments.attach("source", MountSpec("idle", "/idle")),
    "detach": lambda engine: engine.attachments.detach("source", "two"),
    "capture-with-volumes": lambda engine: engine.snapshots.create("source", name="new-mark", volumes=["one", "two"]),
    "fork-with-clones": lambda engine: engine.forks.fork(
        "mark", ForkSpec(names=["fork1", "fork2"], mounts=[MountSpec("one", "/one", clone=True)])
    ),
}


async def _ten_with_volumes(engine: Engine) -> None:
    """Ten sandboxes: every fourth one shares a volume, and all share a fifth, read-only for most of them."""
    for number in range(5):
        await engine.volumes.create(f"v{number}", 64)
    for first in range(4):
        names = [f"box{number}" for number in range(first, 10, 4)]
        mounts = [MountSpec(f"v{first}", "/mine"), MountSpec("v4", "/ours", read_only=first > 0)]
        await engine.forks.fork("plain", ForkSpec(names=names, mounts=mounts))
        await engine.commands.exec(names[0], ["sh", "-c", f"echo v{first} >/mine/who && sync"])
    await engine.commands.exec("box0", ["sh", "-c", "echo v4 >/ours/who && sync"])


SCENES: dict[str, Any] = {"ten-with-volumes": _ten_with_volumes}


def observable_state(engine: Engine) -> Any:
    """Everything about sandboxes and volumes that a restart must not change, as plain data."""
    sandboxes = [each.model_dump(mode="json", exclude={"host"}) for each in engine.sandboxes.list()]
    table = {
        each.name: [(sandbox.name, mount.path, mount.read_only) for sandbox, mount in engine.volumes.mounts_of(each)]
        for each in engine.volumes.list()
    }
    volumes = [each.model_dump(mode="json") for each in engine.volumes.list()]
    return json.loads(json.dumps([sandboxes, volumes, {name: sorted(rows) for name, rows in table.items()}]))


class Daemon:
    """A gateway's engine in a separate process, with a scene."""

    def __init__(self, config: Config, factory: str, scene: str, path: Path) -> None:
        path.write_text(config.model_dump_json())
        self._errors = path.with_suffix(".log").open("w+")
        argv = [sys.executable, "-m", "tests.support.crash", str(path), factory, scene]
        self._process = subprocess.Popen(
            argv, cwd=session.REPOSITORY, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._errors.close()

    def read_scene(self, seconds: float) -> Any:
        """The description of the scene, once it is complete."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], seconds)[0], "the scene was not ready in time"
        line = self._process.stdout.readline()
        self._errors.seek(0)
        assert line, self._errors.read()[-3000:]
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


class Runner:
    """Runs verbs, each in a separate process."""

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._process: subprocess.Popen[str] | None = None

    def run(self, config: Config, verb: str, fatal: int, output: Path) -> int:
        """Returns 0, KILLED, or another exit code; ``output`` then holds the verb's output."""
        if self._process is None:
            argv = [sys.executable, "-m", "tests.support.crash"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                argv, cwd=session.REPOSITORY, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        assert self._process.stdin and self._process.stdout
        order = [config.model_dump_json(), self._factory, verb, fatal, str(output)]
        print(json.dumps(order), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 300)[0], f"{verb} did not end"
        return int(self._process.stdout.readline())

    def end(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=30)
            except subprocess.TimeoutExpired:  # a hanging verb is killed with it
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(30)
            self._process = None


class Steps:
    """Counts steps, and dies before one of them."""

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self.count = 0
        self.qmp: list[int] = []
        """The steps that are commands to QEMU."""
        self.armed = False

    def on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and _writes(arguments)):
            self._step()

    def watch_qmp(self) -> None:
        execute = QMPClient.execute

        async def execute_as_step(client: QMPClient, command: str, *args: Any, **kwargs: Any) -> Any:
            if not command.startswith("query-") and self._step():
                self.qmp.append(self.count)
            return await execute(client, command, *args, **kwargs)

        QMPClient.execute = execute_as_step  # type: ignore[method-assign]

    def _step(self) -> bool:
        if self.armed:
            self.count += 1
            if self.count == self._fatal:
                os._exit(KILLED)
        return self.armed


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


async def _run(host: Host, config: Config, verb: str, steps: Steps) -> None:
    engine = Engine(host, config)
    await engine.open()
    steps.armed = True
    await (VERBS | VOLUME_VERBS)[verb](engine)
    steps.armed = False
    await engine.close()


async def _hold_scene(host: Host, config: Config, scene: str) -> None:
    engine = Engine(host, config)
    await engine.open()
    await SCENES[scene](engine)
    print(json.dumps(observable_state(engine)), flush=True)
    await asyncio.Event().wait()


def _host(factory: str, config: Config) -> Host:
    module, _, name = factory.rpartition(".")
    made: Host = getattr(importlib.import_module(module), name)(config)
    return made


def _run_once(config: Config, factory: str, verb: str, fatal: int) -> None:
    host = _host(factory, config)
    steps = Steps(fatal)
    sys.addaudithook(steps.on_audit)
    steps.watch_qmp()
    asyncio.run(_run(host, config, verb, steps))
    print(json.dumps({"steps": steps.count, "qmp": steps.qmp}), flush=True)


def _serve() -> None:
    for line in sys.stdin:
        config, factory, verb, fatal, output = json.loads(line)
        importlib.import_module(factory.rpartition(".")[0])
        if (child := os.fork()) == 0:
            with Path(output).open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            with Path("/dev/null").open() as nothing:
                os.dup2(nothing.fileno(), 0)
            try:
                _run_once(Config.model_validate_json(config), factory, verb, fatal)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def main() -> None:
    if len(sys.argv) == 1:
        _serve()
        return
    path, factory, scene = sys.argv[1:]
    config = Config.model_validate_json(Path(path).read_text())
    asyncio.run(_hold_scene(_host(factory, config), config, scene))


if __name__ == "__main__":
    main()
