"""Test that a check-mode run changes nothing on a real host: no file, process, mount or dataset, and no event."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.base import Abilities
from tests.collection.plays import empty_gateway
from tests.collection.runner import Target, Task
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.machine_state import read_files, read_machine
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE, World

VERBS = {
    *("create", "replace", "remove", "pause", "resume", "update", "set_timeout", "set_network", "attach", "detach"),
    *("fork", "clone", "capture", "rollback", "build", "grow", "remove_snapshot"),
}
"""The actions of all modules that every host supports."""
TRANSFER_VERBS = {"export", "import", "protect"}


def make_task(module: str, **options: Any) -> Task:
    return {f"grove.sandbox.{module}": options}


def make_mount(name: str) -> dict[str, Any]:
    return {"name": name, "path": f"/srv/{name}"}


SET_UP = (
    make_task("sandbox_volume", name=["data", "spare", "shared"], size_mb=64, snapshots=["monday"]),
    make_task("sandbox", name="box", template=TEMPLATE, volumes=[make_mount("data")]),
    make_task("sandbox", name="other", template=TEMPLATE),
    make_task("sandbox", name="busy", template=TEMPLATE, volumes=[make_mount("shared")]),
    make_task("sandbox_snapshot", name="mark", sandbox="box", volumes=["data"]),
)
PAUSE = make_task("sandbox", name=["box", "other"], state="paused")


def make_export_task(files: Path, name: str = "portable") -> Task:
    """Return a task that exports the snapshot ``portable``, and takes it first if it does not exist."""
    options = {"name": "portable", "sandbox": "other", "memory": "none", "export_to": str(files / name)}
    return make_task("sandbox_snapshot", **options)


def make_volume_export_task(files: Path, name: str = "volume") -> Task:
    """Return a task that exports the snapshot ``monday`` of the volume ``spare``."""
    return make_task("sandbox_volume", name="spare", snapshots=["monday"], export_to=str(files / name))


def make_play(url: str, source: Path, files: Path, abilities: Abilities) -> tuple[Task, ...]:
    """Return tasks that perform every action, on existing objects and on objects that exist only in the plan.

    The last task would run in a sandbox that only the plan contains. ``url``: the gateway's URL. ``source``: the
    directory from which a template is built. ``files``: a directory with exported snapshots of a sandbox and a volume,
    which all users can read.
    """
    web = {"name": "web", "from": "rootfs", "path": str(source)}
    prewarm = [
        make_task("sandbox_template", **web, prewarm=1),
        make_task("sandbox_snapshot", name="mark", sandbox="box", prewarm=1),
    ]
    transfers = [
        make_export_task(files),
        make_export_task(files, "second"),
        make_task("sandbox_snapshot", name="imported", import_from=str(files / "portable")),
        make_task("sandbox_snapshot", name=["portable", "imported"], state="absent"),
        make_volume_export_task(files),
        make_volume_export_task(files, "second volume"),
        make_task("sandbox_volume", name="imported", import_from=str(files / "volume"), size_mb=128),
        make_task("sandbox_volume", name="imported", state="absent"),
    ]
    return (
        make_task("sandbox_template", **web),
        *(prewarm if abilities.prewarm else ()),
        *(transfers if abilities.transfer else ()),
        make_task("sandbox", name="fresh", template="web"),
        make_task("sandbox_volume", name="copy", size_mb=128, from_snapshot="data@monday"),
        make_task("sandbox_volume", name="data", snapshots=["monday", "tuesday"]),
        make_task("sandbox_volume", name="data", size_mb=128),
        make_task("sandbox_volume", name="spare", attachments=[{"sandbox": "busy", "path": "/srv/spare"}]),
        make_task("sandbox_volume", name="spare", attachments=[]),
        make_task("sandbox_volume", name="spare", rollback_to="monday"),
        make_task("sandbox_volume", name="spare", snapshots=[], purge=True),
        make_task("sandbox", name="busy", metadata={"a": "b"}, timeout=3600, network={"allow_internet": False}),
        make_task("sandbox", name="busy", volumes=[make_mount("shared"), make_mount("copy")]),
        make_task("sandbox", name="box", state="running"),
        make_task("sandbox_snapshot", name="mark-2", sandbox="box"),
        make_task("sandbox_fork", snapshot="mark-2", count=2, name_prefix="fork"),
        make_task("sandbox_fork", sandbox="busy", names=["clone"]),
        make_task("sandbox", name="fork-1", state="paused"),
        make_task("sandbox_rollback", sandbox="box", snapshot="mark", unless_clean=False, backup_name="backup"),
        make_task("sandbox", name="other", template="web", recreate=True),
        make_task("sandbox_info"),
        make_task("sandbox_snapshot_info"),
        make_task("sandbox_template_info"),
        make_task("sandbox_volume_info"),
        make_task("sandbox", name=["busy", "box", "other", "fork-1", "fork-2", "clone"], state="absent"),
        make_task("sandbox_snapshot", name=["mark-2", "mark", "backup"], state="absent"),
        make_task("sandbox_volume", name="copy", state="absent"),
        make_task("sandbox_volume", name=["data", "shared"], state="absent", purge=True),
        make_task("sandbox_template", name=["web", TEMPLATE], state="absent", when_unused=True),
        {
            "ansible.builtin.add_host": {
                "name": "fresh",
                "ansible_connection": "grove.sandbox.sandbox",
                "ansible_sandbox_gateway_url": url,
            }
        },
        {"ansible.builtin.command": "touch /written", "delegate_to": "fresh"},
    )


@pytest.fixture
def gateway(world: World) -> Iterator[tuple[Gateway, Config]]:
    directory, config = session.get_run_dir() / "plans", world.make_config()
    directory.mkdir(exist_ok=True)
    with world_gateway(world, directory, config=config) as gateway:
        yield gateway, config
        empty_gateway(gateway.url)


@contextmanager
def stopped(pids: set[str]) -> Iterator[None]:
    """Stop guests inside the context, because a running guest writes to its files. A check-mode run needs no guests."""
    for pid in pids:
        os.kill(int(pid), signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(int(pid), signal.SIGCONT)


@contextmanager
def collected_events(gateway: Gateway, last_event: str) -> Iterator[list[str]]:
    """Collect the names of all events of a gateway. The end of the context waits for the event ``last_event``."""
    events: list[str] = []
    is_connected = threading.Event()

    def collect() -> None:
        transport = httpx.HTTPTransport(uds=str(gateway.socket))
        with (
            httpx.Client(transport=transport, base_url="http://gateway", timeout=300) as client,
            client.stream("GET", "/events") as response,
        ):
            for line in response.iter_lines():
                is_connected.set()
                if line.startswith("event: "):
                    events.append(line.removeprefix("event: "))
                if events[-1:] == [last_event]:
                    return

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    assert is_connected.wait(30)
    yield events
    thread.join(60)
    assert not thread.is_alive(), events


def test_a_check_mode_run_changes_nothing_on_the_host(
    gateway: tuple[Gateway, Config], world: World, tmp_path: Path
) -> None:
    server, config = gateway
    target = Target(server.url, tmp_path)
    (tmp_path / "web").mkdir()
    files = tmp_path / "files"
    files.mkdir()
    transfers = (make_export_task(files), make_volume_export_task(files)) if world.abilities.transfer else ()
    for result in target.play(*SET_UP, *transfers, PAUSE):
        assert result["changed"], target.output
    for file in files.iterdir():
        file.chmod(0o644)
    play = make_play(server.url, tmp_path / "web", files, world.abilities)

    def read_state() -> dict[str, Any]:
        return {**read_machine(world, config), "transfers": dict(read_files([files]))}

    machines = world.read_traces(config)["processes"]
    assert machines
    with collected_events(server, "volume.grown") as events:
        with stopped(machines):
            before = read_state()
            results = target.run({"tasks": [*play]}, options=("--check", "--diff", "-v"))
            assert_unchanged(before, read_state())
        assert events == []
        assert len(results) == len(play) - 1 and "failed=0" in target.output, target.output
        assert "sandbox fresh exists only in the plan: this task is skipped" in target.output, target.output
        planned_verbs = {
            verb for result in results for each in result.get("outcomes", ()) for verb in each.get("actions", ())
        }
        optional_verbs = {"prewarm"} if world.abilities.prewarm else set()
        optional_verbs |= TRANSFER_VERBS if world.abilities.transfer else set()
        assert planned_verbs == VERBS | optional_verbs
        # The same comparison detects what a run changes.
        for result in target.play(
            make_task("sandbox", name="box", state="running"), make_task("sandbox_volume", name="data", size_mb=128)
        ):
            assert result["changed"], target.output
    after = read_state()
    assert {kind for kind in before if after[kind] != before[kind]} >= {"files", "processes", "traces"}
    assert (after["properties"] != before["properties"]) is bool(before["properties"])
    assert events[-1] == "volume.grown" and len(events) > 1


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for kind, state in before.items():
        if after[kind] != state:
            items = [*state, *after[kind]]
            if isinstance(state, dict):
                differences = {key: (state.get(key), after[kind].get(key)) for key in items}
            else:
                differences = {key: (key in state, key in after[kind]) for key in items}
            raise AssertionError((kind, {key: pair for key, pair in differences.items() if pair[0] != pair[1]}))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "file").write_bytes(b"B"),
        lambda root: os.truncate(root / "sparse", (8 << 20) + 1),
        lambda root: os.utime(root / "file"),
        lambda root: (root / "file").chmod(0o600),
        lambda root: (root / "directory").chmod(0o700),
        lambda root: (root / "directory" / "new").mkdir(),
        lambda root: (root / "directory").rmdir(),
        lambda root: ((root / "link").unlink(), (root / "link").symlink_to("directory")),
        lambda root: os.link(root / "file", root / "second name"),
    ],
)
def test_every_change_to_a_file_is_detected(tmp_path: Path, change: Any) -> None:
    (tmp_path / "file").write_bytes(b"A")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("file")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(8 << 20)
    before = dict(read_files([tmp_path]))
    assert before == dict(read_files([tmp_path])) and len(before) == 5
    change(tmp_path)
    assert before != dict(read_files([tmp_path]))


def test_written_data_is_detected_without_its_modification_time(tmp_path: Path) -> None:
    """The digest of a sparse file covers every block that contains data."""
    path, digests = tmp_path / "image", set()
    for offset in (None, 0, (1 << 20) - 1, 5 << 20, (8 << 20) - 1):
        with path.open("wb") as file:
            file.truncate(8 << 20)
            if offset is not None:
                os.pwrite(file.fileno(), b"x", offset)
        digests.add(dict(read_files([tmp_path]))[str(path)][-1])
    assert len(digests) == 5
