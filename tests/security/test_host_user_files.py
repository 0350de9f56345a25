"""An ordinary user of the host, or a guest in control of a process that serves it, tries to read others' files."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from zfs_core import process

from sandbox_gateway import command
from sandbox_gateway.engine.spec import ForkSpec, MountSpec
from sandbox_gateway.hosts.kvm_xfs.template import debian
from tests.kvm_xfs.conftest import build
from tests.kvm_xfs.test_rootfs import create_recipe, tree  # noqa: F401
from tests.support import session
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.jail_world import JailZfsWorld
from tests.support.live import EngineRunner, engines
from tests.support.worlds import TEMPLATE as WORLD_TEMPLATE

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
    """Return the ``paths`` that an unprivileged user can read."""
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
    (log_file := session.get_run_dir() / "live.log").unlink(missing_ok=True)
    new_gateway = gateway({"log": {"file": str(log_file)}})
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
    tarballs = list(session.get_cache_dir().glob("rootfs-*.tar"))
    assert tarballs, (
        f"{session.get_cache_dir()} has templates, but not the tarballs that they were built from: remove it"
    )
    log_file = session.get_run_dir() / "live.log"
    assert log_file.stat().st_size > 0
    assert find_readable_files([*files, *tarballs, log_file]) == []


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory in which every user of the host can read files."""
    directory = session.get_run_dir() / "public"
    directory.mkdir(mode=0o755)
    (directory / "readable").touch(0o644)
    assert find_readable_files([directory / "readable"])
    yield directory
    shutil.rmtree(directory)


def test_a_host_user_cannot_read_a_new_template(requires_root: None, tree: Path, public_directory: Path) -> None:  # noqa: F811
    """No restart of the gateway has corrected the permissions of these files yet."""
    rootfs = build(create_recipe(tree), public_directory)
    files = [rootfs.image, rootfs.kernel, rootfs.initrd]
    assert all(path.stat().st_size for path in files)
    assert find_readable_files(files) == []


@pytest.mark.parametrize("is_other_file_system", [False, True], ids=["rename", "copy"])
def test_a_host_user_cannot_read_a_new_tarball(
    xfs_root: Path, public_directory: Path, is_other_file_system: bool
) -> None:
    """mmdebstrap creates tarballs that everyone can read, in a directory that only root can enter."""
    tarball = (xfs_root if is_other_file_system else public_directory) / "rootfs.tar"
    tarball.touch(0o644)
    assert find_readable_files([tarball])
    cached_tarball = public_directory / "rootfs-0.tar"
    debian._commit_tarball(tarball, cached_tarball)
    tarball.unlink(missing_ok=True)
    assert cached_tarball.is_file() and find_readable_files([cached_tarball]) == []


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
    assert command.read_proxy_settings() == {"https_proxy": SECRETS["https_proxy"]}


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


@pytest.fixture
def make_jail_engine(jail_zfs_world: JailZfsWorld) -> Iterator[Callable[..., EngineRunner]]:
    with engines(jail_zfs_world) as make_runner:
        yield make_runner


def test_a_host_user_cannot_read_the_files_of_a_jail_host(make_jail_engine: Callable[..., EngineRunner]) -> None:
    """This includes the lock file: a user who could open it could lock it, and so keep the gateway from starting."""
    runner = make_jail_engine()
    state_root = runner.config.host.state_root
    runner.do(runner.engine.forks.create(WORLD_TEMPLATE, ForkSpec(names=["box"], env={"API_KEY": "s3cret"})))
    files = [path for path in state_root.rglob("*") if path.is_file()]
    (lock_file,) = (path for path in files if path.suffix == ".lock")
    (hostname_file,) = (path for path in files if path.name == "hostname")
    assert {path.name for path in files} >= {"machine-id", "resolv.conf", "gateway-key", "secret"}
    assert (state_root / "secrets") in {path.parent.parent for path in files}
    assert find_readable_files(files) == []
    jail_command = ["cat", "/run/sandbox/hostname", "/etc/machine-id", "/etc/resolv.conf"]
    assert runner.do(runner.engine.commands.exec("box", jail_command, user="user")).exit_code == 0

    runner.close()
    lock_file.chmod(0o644)
    hostname_file.parent.parent.chmod(0o755)
    assert {*find_readable_files(files)} >= {str(lock_file), str(hostname_file)}, "an older release left them like this"
    make_jail_engine(runner.config)
    assert find_readable_files(files) == []


def test_a_host_user_cannot_run_a_jails_programs(
    jail_zfs_world: JailZfsWorld, make_jail_engine: Callable[..., EngineRunner]
) -> None:
    """Root in a jail can create a set-user-ID program, which any user of the host could otherwise run as root."""
    runner = make_jail_engine()
    runner.do(runner.engine.volumes.create("data", 64))
    spec = ForkSpec(names=["box"], mounts=[MountSpec("data", "/data", False)])
    runner.do(runner.engine.forks.create(WORLD_TEMPLATE, spec))
    for directory in ("/srv", "/data"):
        runner.shell("box", f"cp /usr/bin/id {directory}/planted && chmod 4755 {directory}/planted")
    root_directory = jail_zfs_world.get_mount_point(runner.config)
    programs = [*root_directory.glob("sandboxes/*/srv/planted"), *root_directory.glob("volumes/*/planted")]
    assert len(programs) == 2
    for program in programs:
        assert_host_user_cannot_run(program)
    assert (root_directory / "retired").stat().st_mode & 0o777 == 0o700, "programs of removed sandboxes"


def assert_host_user_cannot_run(program: Path) -> None:
    """Assert that only root can run a set-user-ID program."""
    assert program.stat().st_mode & 0o7777 == 0o4755
    assert subprocess.run([program, "-u"], cwd="/", timeout=20, capture_output=True).stdout == b"0\n"
    with pytest.raises(PermissionError):
        subprocess.run([program, "-u"], user=NOBODY_UID, group=NOBODY_UID, extra_groups=[], cwd="/", timeout=20)
