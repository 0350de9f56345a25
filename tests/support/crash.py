"""Run verbs of an engine, each in a process of its own, and die in the middle: ``python -m tests.support.crash``.

Every step that changes the world outside the process (a file made, linked, renamed, removed, an ioctl, a process
started, a command to QEMU) is counted by an audit hook; at the step that was asked for the process is gone at once,
as by ``kill -9``. Without such a step it ends normally and prints how many there were. Verbs are run by copies
(``fork``) of a process that has imported all, and reads which. With arguments a scene is set up instead, described on
standard output, and stands until somebody kills the process.
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

VERBS: dict[str, Any] = {
    "create": lambda engine: engine.create("plain", ForkSpec(names=["new"])),
    "fork": lambda engine: engine.fork("mark", ForkSpec(names=["new", "new2"])),
    "capture": lambda engine: engine.capture("source", name="new"),
    "rollback": lambda engine: engine.rollback("source", "mark"),
    "pause": lambda engine: engine.pause("source"),
    "resume": lambda engine: engine.resume("sleeper"),
    "kill": lambda engine: engine.kill("spare"),
    "delete": lambda engine: engine.delete_snapshot("spare-mark"),
}

VOLUME_VERBS: dict[str, Any] = {
    "volume-create": lambda engine: engine.create_volume("new", 64),
    "volume-clone": lambda engine: engine.create_volume("new", from_snapshot="idle@before"),
    "volume-grow": lambda engine: engine.grow_volume("one", engine.volume("one").size_mb + 32),
    "volume-capture": lambda engine: engine.snapshot_volume("one", "new"),
    "volume-rollback": lambda engine: engine.rollback_volume("idle", "before"),
    "volume-delete": lambda engine: engine.delete_volume("spare", with_snapshots=True),
    "attach": lambda engine: engine.attach("source", MountSpec("idle", "/idle")),
    "detach": lambda engine: engine.detach("source", "two"),
    "capture-with-volumes": lambda engine: engine.capture("source", name="new-mark", volumes=["one", "two"]),
    "fork-with-clones": lambda engine: engine.fork(
        "mark", ForkSpec(names=["fork1", "fork2"], mounts=[MountSpec("one", "/one", clone=True)])
    ),
}


async def _ten_with_volumes(engine: Engine) -> None:
    """Ten sandboxes: each fourth shares a volume of theirs, all share a fifth, which but the first only read."""
    for number in range(5):
        await engine.create_volume(f"v{number}", 64)
    for first in range(4):
        names = [f"box{number}" for number in range(first, 10, 4)]
        mounts = [MountSpec(f"v{first}", "/mine"), MountSpec("v4", "/ours", read_only=first > 0)]
        await engine.fork("plain", ForkSpec(names=names, mounts=mounts))
        await engine.exec(names[0], ["sh", "-c", f"echo v{first} >/mine/who && sync"])
    await engine.exec("box0", ["sh", "-c", "echo v4 >/ours/who && sync"])


SCENES: dict[str, Any] = {"ten-with-volumes": _ten_with_volumes}


def picture(engine: Engine) -> Any:
    """Everything about sandboxes and volumes that a restart must not change, as plain data."""
    sandboxes = [each.model_dump(mode="json", exclude={"host"}) for each in engine.sandboxes()]
    table = {
        each.name: [(sandbox.name, mount.path, mount.read_only) for sandbox, mount in engine.mounts_of(each)]
        for each in engine.volumes()
    }
    volumes = [each.model_dump(mode="json") for each in engine.volumes()]
    return json.loads(json.dumps([sandboxes, volumes, {name: sorted(rows) for name, rows in table.items()}]))


class Daemon:
    """A gateway's engine in a process of its own, with a scene."""

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

    def says(self, seconds: float) -> Any:
        """The scene's picture, when it stands."""
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
    """Runs verbs, each in a process of its own."""

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._process: subprocess.Popen[str] | None = None

    def run(self, config: Config, verb: str, fatal: int, output: Path) -> int:
        """How it ended: 0, KILLED, or otherwise; what it said is in ``output`` then."""
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
            except subprocess.TimeoutExpired:  # a verb that hangs goes with it
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(30)
            self._process = None


class Steps:
    """Counts steps, and dies at one."""

    def __init__(self, fatal: int) -> None:
        self._fatal = fatal
        self.count = 0
        self.armed = False

    def step(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.armed and (event in _CHANGES or (event == "open" and _writes(arguments))):
            self.count += 1
            if self.count == self._fatal:
                os._exit(KILLED)


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


async def _run(host: Host, config: Config, verb: str, steps: Steps) -> None:
    engine = Engine(host, config)
    await engine.open()
    steps.armed = True
    await (VERBS | VOLUME_VERBS)[verb](engine)
    steps.armed = False
    await engine.close()


async def _stand(host: Host, config: Config, scene: str) -> None:
    engine = Engine(host, config)
    await engine.open()
    await SCENES[scene](engine)
    print(json.dumps(picture(engine)), flush=True)
    await asyncio.Event().wait()


def _host(factory: str, config: Config) -> Host:
    module, _, name = factory.rpartition(".")
    made: Host = getattr(importlib.import_module(module), name)(config)
    return made


def _once(config: Config, factory: str, verb: str, fatal: int) -> None:
    host = _host(factory, config)
    steps = Steps(fatal)
    sys.addaudithook(steps.step)
    asyncio.run(_run(host, config, verb, steps))
    print(steps.count, flush=True)


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
                _once(Config.model_validate_json(config), factory, verb, fatal)
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
    asyncio.run(_stand(_host(factory, config), config, scene))


if __name__ == "__main__":
    main()
