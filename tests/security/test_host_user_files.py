"""An ordinary user of the host, or a guest in control of a process that serves it, tries to read others' files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway import command
from sandbox_gateway.zfs import process
from tests.support import session
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.jail_world import JailZfsWorld
from tests.support.live import Live

SECRETS = {"SANDBOX_GATEWAY_TOKEN": "s3cret", "https_proxy": "http://user:s3cret@proxy", "NOTIFY_SOCKET": "/run/notify"}
NOBODY_UID = 65534

# Paths are not secret, because `ps` shows the paths of a machine's files.
READ_SCRIPT = """
import json, sys
readable = []
for path in json.load(sys.stdin):
    try:
        open(path, "rb").read(1)
        readable.append(path)
    except OSError:
        pass
print(json.dumps(readable))
"""


def find_readable_files(paths: list[Path]) -> list[str]:
    """Return those of ``paths`` that an unprivileged user can read."""
    result = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", READ_SCRIPT],
        input=json.dumps([str(path) for path in paths]),
        user=NOBODY_UID,
        group=NOBODY_UID,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    readable_paths: list[str] = json.loads(result.stdout)
    return readable_paths


def list_files(gateway: Gateway) -> list[Path]:
    return [path for path in gateway.state_root.rglob("*") if path.is_file()]


@pytest.fixture
def gateway_with_secrets(gateway: Callable[..., Gateway], monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """A gateway with secrets in its environment, and with one object of each kind."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    new_gateway = gateway()
    new_gateway.call("POST", "/volumes", {"name": "data", "sizeMB": 64})
    mounts = [{"name": "data", "path": "/data"}]
    new_gateway.call(
        "POST", "/sandboxes", {"templateID": TEMPLATE, "name": "box", "timeout": -1, "volumeMounts": mounts}
    )
    new_gateway.call("POST", "/sandboxes/box/snapshots", {"name": "mark", "volumes": ["data"]})
    new_gateway.call("POST", "/volumes/data/snapshots", {"name": "alone"})
    new_gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "sleeps", "timeout": -1})
    new_gateway.call("POST", "/sandboxes/sleeps/pause")
    return new_gateway


def test_a_host_user_cannot_read_the_gateways_files(gateway_with_secrets: Gateway) -> None:
    files = list_files(gateway_with_secrets)
    file_names = {path.name for path in files}
    assert file_names >= {
        "kernel",
        "initrd",
        "rootfs.img",
        "memory.img",
        "memory.base",
        "volume.img",
        "manifest.json",
        "secret",
    }
    assert find_readable_files(files) == []
    assert find_readable_files(list(session.cache_dir().glob("rootfs-*.tar"))) == []


def test_loose_permissions_of_an_older_release_are_tightened(gateway_with_secrets: Gateway) -> None:
    exposed_files = [
        path
        for path in list_files(gateway_with_secrets)
        if path.name in ("kernel", "initrd", "rootfs.img", "manifest.json")
    ]
    for path in exposed_files:
        path.chmod(0o644)
    assert find_readable_files(exposed_files)
    gateway_with_secrets.restart()
    assert find_readable_files(list_files(gateway_with_secrets)) == []
    assert gateway_with_secrets.sh("box", "cat /proc/uptime")


def test_processes_for_guests_have_no_secret_in_their_environment(gateway_with_secrets: Gateway) -> None:
    pids_by_program = {name: pid for pid, name in find_processes(str(gateway_with_secrets.state_root))}
    assert any("qemu" in name for name in pids_by_program) and any("ganesha" in name for name in pids_by_program)
    for name, pid in pids_by_program.items():
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert {variable.partition("=")[0] for variable in variables} <= {"", "PATH", "TMPDIR", "LC_ALL"}, name


def test_commands_have_no_secret_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert "s3cret" not in command.run(["env"], timeout=10, env={"MORE": "x"}).stdout
    assert not SECRETS.keys() & process._build_environment().keys()
    assert command.proxy_settings() == {"https_proxy": SECRETS["https_proxy"]}


def find_processes(path: str) -> list[tuple[int, str]]:
    """Return (pid, program) of the processes with ``path`` in their command line."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if any(f"{path}/" in argument for argument in arguments):
            processes.append((int(entry.name), Path(arguments[0]).name))
    return processes


def test_a_host_user_cannot_run_a_jails_programs(jail_zfs_world: JailZfsWorld) -> None:
    """Root in a jail can create a set-user-ID program, which any user of the host could otherwise run as root."""
    live_engine = Live(jail_zfs_world.host(config := jail_zfs_world.config()), config)
    try:
        host: Any = live_engine.engine.host
        for name in ("sandboxes", "retired", "volumes"):
            directory = host._storage.root.mountpoint / name
            assert directory.stat().st_mode & 0o777 == 0o700, name
    finally:
        live_engine.close()
        jail_zfs_world.clean_up(config)
