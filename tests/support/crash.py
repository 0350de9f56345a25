"""Run one verb of an engine in a process of its own, and die in the middle: ``python -m tests.support.crash``.

Every step that changes the world outside the process (a file made, linked, renamed, removed, an ioctl, a process
started, a command to QEMU) is counted by an audit hook; at the step that was asked for the process is gone at once,
as by ``kill -9``. Without such a step it ends normally and prints how many there were.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.spec import ForkSpec

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


async def _run(host: Any, config: Config, verb: str, steps: Steps) -> None:
    engine = Engine(host, config)
    await engine.open()
    steps.armed = True
    await VERBS[verb](engine)
    steps.armed = False
    await engine.close()


def main() -> None:
    path, factory, verb, fatal = sys.argv[1:]
    module, _, name = factory.rpartition(".")
    config = Config.model_validate(json.loads(Path(path).read_text()))
    host = getattr(importlib.import_module(module), name)(config)
    steps = Steps(int(fatal))
    sys.addaudithook(steps.step)
    asyncio.run(_run(host, config, verb, steps))
    print(steps.count)


if __name__ == "__main__":
    main()
