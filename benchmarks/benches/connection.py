"""Measure the cost of a task in a sandbox by running the same play over the connection plugin and over SSH.

The hosts of the play are forks of one snapshot.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.plays import Plays
from tests.support import jail_world, session
from tests.support.gateway import Gateway
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE

_FILE_COUNT, _FILE_BYTES = 4, 16 << 10
_FETCHED_FILE_BYTES = 1 << 20
_TITLES = {
    "facts": "gather facts",
    "copy": f"copy a tree of {_FILE_COUNT} files",
    "command": "run a command",
    "fetch": "fetch a file of 1 MiB",
}
_JAIL_NOTE = (
    "the sandboxes are jails on Linux (zfs-fuse, tests/freebsd_shim), where programs run as fast as "
    "outside. In virtual machines without KVM the modules take seconds, which would hide the cost of the connection"
)
_METHOD_NOTE = (
    "sshd runs in one of the forks. Control connections persist, pipelining is enabled for both, and Ansible "
    "works on one host at a time. The duration of a task on many forks is divided by their number"
)
_USER, _HOME = "player", "/home/player"
_PREPARATION_SCRIPT = f"""
set -e
useradd --create-home --shell /bin/sh {_USER}
cd {_HOME}
mkdir -m 700 .ssh
cat >.ssh/authorized_keys
ssh-keygen -q -t ed25519 -N "" -f .ssh/host
head -c {_FETCHED_FILE_BYTES} /dev/urandom >fetched
chown -R {_USER}: .
"""
_SSH_PORT = 2222
# Run sshd as an ordinary user: as root it calls chroot(2), which the shim's jails forbid.
_SSHD_COMMAND = (
    f"exec /usr/sbin/sshd -p {_SSH_PORT} -h {_HOME}/.ssh/host -E {_HOME}/sshd.log -o UsePAM=no -o PidFile=none"
)


class Connection:
    name = "connection"
    title = "a play on forks, over the connection plugin and over SSH"

    def run(self, ctx: Context) -> Result:
        rounds, fleet_rounds = ctx.choose(full=6, quick=1), ctx.choose(full=2, quick=1)
        count = ctx.choose(full=20, quick=4)
        settings = {"rounds": rounds, "fleets": fleet_rounds, "forks": count, "at_once": 1, "zfs": "zfs-fuse"}
        result = Result(self.name, self.title, settings, notes=[_JAIL_NOTE, _METHOD_NOTE])
        samples: dict[str, list[float]] = defaultdict(list)
        with _running_forks(ctx, count) as forks, ctx.showing_progress("plays", 2 * rounds + fleet_rounds) as steps:
            playbook = _Playbook(forks)
            for number in range(rounds):
                for inventory in ("ssh", "ours"):
                    for task, elapsed in playbook.time_tasks(inventory).items():
                        samples[f"{inventory}_{task}"].append(elapsed)
                    steps.advance()
                if number < fleet_rounds:
                    for task, elapsed in playbook.time_tasks("fleet").items():
                        samples[f"fleet_{task}"].append(elapsed / count)
                    steps.advance()
        for task, title in _TITLES.items():
            floor, target = f"ssh_{task}", Target("ratio", 1.0)
            result.add_measure(floor, f"{title}: over SSH", samples=samples[floor])
            for prefix, description in (
                ("ours", "over the connection plugin"),
                ("fleet", f"over the connection plugin, per fork of {count}"),
            ):
                key = f"{prefix}_{task}"
                result.add_measure(key, f"{title}: {description}", samples=samples[key], floor=floor, target=target)
        return result


class _Forks:
    """The forks that the play uses, with one inventory for each way to run it.

    ``ssh`` contains the first fork, over SSH. ``ours`` and ``fleet`` use the connection plugin: ``ours`` contains the
    first fork, and ``fleet`` contains all forks.
    """

    def __init__(self, scratch: Path, socket: str, ids: list[str], address: str, key: Path) -> None:
        self.scratch = scratch
        connection = {"ansible_connection": "grove.sandbox.sandbox", "ansible_sandbox_gateway_url": f"unix://{socket}"}
        sandboxes = {f"fork-{number}": {**connection, "ansible_host": ident} for number, ident in enumerate(ids, 1)}
        ssh = {"ansible_connection": "ssh", "ansible_host": address, "ansible_port": str(_SSH_PORT)}
        ssh |= {"ansible_ssh_private_key_file": str(key), "ansible_ssh_common_args": "-o UserKnownHostsFile=/dev/null"}
        self.inventories = {
            name: self._write_inventory(name, hosts)
            for name, hosts in (
                ("ssh", {"fork-1": ssh}),
                ("ours", {"fork-1": sandboxes["fork-1"]}),
                ("fleet", sandboxes),
            )
        }

    def _write_inventory(self, name: str, hosts: dict[str, dict[str, str]]) -> Path:
        path = self.scratch / f"{name}.json"
        variables = {"ansible_python_interpreter": "/usr/bin/python3", "ansible_user": _USER}
        path.write_text(json.dumps({"all": {"hosts": hosts, "vars": variables}}))
        return path


class _Playbook:
    """The measured play. Each run copies to a new directory, so that there is always something to copy."""

    def __init__(self, forks: _Forks) -> None:
        self._forks = forks
        self._run_count = 0
        self._tree = forks.scratch / "tree"
        for number in range(_FILE_COUNT):
            directory = self._tree / f"part-{number % 2}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"file-{number}").write_bytes(os.urandom(_FILE_BYTES))
        # The path of a control socket must be short.
        self._control_sockets = session.get_run_dir() / "ssh"
        self._control_sockets.mkdir()
        environment = {"ANSIBLE_HOST_KEY_CHECKING": "False", "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._control_sockets)}
        self._plays = Plays(forks.scratch, {**environment, "ANSIBLE_PIPELINING": "True"})

    def time_tasks(self, inventory: str) -> dict[str, float]:
        """Run the play with an inventory and return the duration of each task in milliseconds.

        Closes the connections afterwards, so that each run opens new ones.
        """
        self._run_count += 1
        fetch_directory = self._forks.scratch / "fetched"
        tasks = [
            {"name": "facts", "ansible.builtin.setup": {}},
            {
                "name": "copy",
                "ansible.builtin.copy": {"src": f"{self._tree}/", "dest": f"{_HOME}/tree-{self._run_count}/"},
            },
            {"name": "command", "ansible.builtin.command": {"cmd": "uname -a"}},
            {"name": "fetch", "ansible.builtin.fetch": {"src": f"{_HOME}/fetched", "dest": f"{fetch_directory}/"}},
        ]
        try:
            timed_tasks = self._plays.run(self._forks.inventories[inventory], tasks, forks=1)
        finally:
            for path in self._control_sockets.iterdir():
                argv = ["ssh", "-o", f"ControlPath={path}", "-O", "exit", "fork-1"]
                subprocess.run(argv, capture_output=True, timeout=20, check=False)
        sizes = {path.stat().st_size for path in fetch_directory.rglob("fetched") if path.is_file()}
        if sizes != {_FETCHED_FILE_BYTES}:
            raise RuntimeError(f"the fetched files have these sizes in bytes: {sizes}, not {_FETCHED_FILE_BYTES}")
        shutil.rmtree(fetch_directory)
        return {task.name: task.ms for task in timed_tasks}


@contextlib.contextmanager
def _running_forks(ctx: Context, count: int) -> Iterator[_Forks]:
    """Run a gateway with a separate pool and ``count`` forks of a snapshot. The first fork runs sshd.

    Removes everything at the end.
    """
    scratch = session.get_run_dir() / "connection"
    scratch.mkdir()
    packages = (*jail_world._PACKAGES, "openssh-server")
    ctx.print_progress(
        "building a root file system with sshd (only the first time) and a jail template on a separate pool"
    )
    with (
        mock.patch.object(jail_world, "_PACKAGES", packages),
        jail_world.jail_zfs_world() as world,
        world_gateway(world, scratch, log={"level": "info"}) as gateway,
    ):
        yield _prepare_forks(gateway, scratch, count)


def _prepare_forks(gateway: Gateway, scratch: Path, count: int) -> _Forks:
    key = scratch / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=60)
    public_key = key.with_suffix(".pub").read_bytes()
    source = gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE})["sandboxID"]
    _run_script(gateway, source, _PREPARATION_SCRIPT, public_key)
    snapshot = gateway.call("POST", f"/sandboxes/{source}/snapshots", {})["snapshotID"]
    gateway.call("DELETE", f"/sandboxes/{source}")
    names = [f"fork-{number}" for number in range(1, count + 1)]
    forks = gateway.call("POST", f"/snapshots/{snapshot}/fork", {"names": names})["sandboxes"]
    ids = [fork["sandboxID"] for fork in forks]
    _run_script(gateway, ids[0], _SSHD_COMMAND, user=_USER)
    address = gateway.call("GET", f"/sandboxes/{ids[0]}")["address"]
    ssh_options = (
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "BatchMode=yes",
        "-p",
        str(_SSH_PORT),
    )
    login_result = subprocess.run(
        ["ssh", "-i", key, *ssh_options, f"{_USER}@{address}", "true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if login_result.returncode != 0:
        log = gateway.execute(ids[0], "tail", "-n", "20", f"{_HOME}/sshd.log")["stdout"]
        raise RuntimeError(f"the fork cannot be reached over SSH: {login_result.stderr[-2000:]}\n{log}")
    return _Forks(scratch, str(gateway.socket), ids, address, key)


def _run_script(gateway: Gateway, sandbox: str, script: str, stdin: bytes = b"", **options: Any) -> None:
    encoded = base64.b64encode(stdin).decode()
    result = gateway.execute(sandbox, "/bin/sh", "-c", script, stdin=encoded, **options)
    if result["exitCode"] != 0:
        raise RuntimeError(f"a command in sandbox {sandbox} failed: {result['stderr'][-2000:]}")
