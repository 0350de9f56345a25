"""Measure the duration of `sandboxctl` commands, compared with a program that only sends the same request."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.timers import time_call
from tests.support.memory_gateway import MemoryGateway

_SANDBOX_COUNT = 10
_MAX_LIST_RATIO = 1.3
_NOTE = "the floor is a Python program that imports only http.client and json, sends the request and parses the answer"
_FLOOR_PROGRAM = """
import http.client, json, socket, sys
connection = http.client.HTTPConnection("gateway")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("GET", "/sandboxes?limit=1000")
json.loads(connection.getresponse().read())
"""
# What pip's `sandboxctl` script does.
_SANDBOXCTL_PROGRAM = "from sandbox_gateway.cli.main import main; main()"
_COMMANDS = {
    "list": ("list", "list sandboxes"),
    "list_json": ("list --json", "list sandboxes as JSON"),
    "show": ("show one", "show a sandbox"),
    "rename": ("rename one one", "rename a sandbox, which uses the command-line library"),
}


class Cli:
    name = "cli"
    title = "commands of sandboxctl"

    def run(self, ctx: Context) -> Result:
        rounds = ctx.choose(full=40, quick=3)
        result = Result(self.name, self.title, {"rounds": rounds, "sandboxes": _SANDBOX_COUNT}, notes=[_NOTE])
        samples: dict[str, list[float]] = defaultdict(list)
        with TemporaryDirectory() as root, ctx.showing_progress("rounds", rounds) as steps:
            gateway = MemoryGateway(Path(root))
            try:
                _create_sandboxes(gateway)
                url = ["--url", gateway.unix_url]
                programs = {key: [_SANDBOXCTL_PROGRAM, *url, *line.split()] for key, (line, _) in _COMMANDS.items()}
                programs = {"floor": [_FLOOR_PROGRAM, str(gateway.socket)], **programs}
                for arguments in programs.values():
                    _time_program(arguments, Path(root))  # writes the bytecode that an installed package has
                for _ in range(rounds):
                    for key, arguments in programs.items():
                        samples[key].append(_time_program(arguments, Path(root)))
                    steps.advance()
                gateway.clear()
            finally:
                gateway.end()
        result.add_measure("floor", "floor: the request alone", samples=samples["floor"])
        for key, (_, title) in _COMMANDS.items():
            target = Target("ratio", _MAX_LIST_RATIO) if key == "list" else None
            result.add_measure(key, title, samples=samples[key], floor="floor", target=target)
        return result


def _create_sandboxes(gateway: MemoryGateway) -> None:
    gateway.build_template()
    with gateway.client() as client:
        for name in ("one", *(f"other-{number}" for number in range(1, _SANDBOX_COUNT))):
            client.post("/sandboxes", json={"templateID": "base", "name": name}).raise_for_status()


def _time_program(arguments: list[str], root: Path) -> float:
    """Run a Python program and return its duration in milliseconds. Raises CalledProcessError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(root / "bytecode")
    argv = [sys.executable, "-c", *arguments]
    _, elapsed = time_call(lambda: subprocess.run(argv, check=True, capture_output=True, timeout=60, env=environment))
    return elapsed
