"""Kinds of host for engine tests, with methods to set the hosts up, observe them and cause faults."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Abilities, Host
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import list_running_processes
from sandbox_gateway.hosts.kvm_xfs.volumes.pending_snapshots import PendingSnapshot
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import SandboxState, Snapshot, SnapshotKind
from tests.support import session, templates
from tests.support.live import EngineRunner

TEMPLATE = "plain"
_config_numbers = itertools.count(1)
_SETTLE_TIMEOUT_SECONDS = 20

Traces = dict[str, set[str]]


def wait_for_traces(take_traces: Callable[[], Traces], is_expected: Callable[[Traces], bool]) -> Traces:
    """Wait until ``is_expected(traces)`` is true or 20 seconds have passed, and return the last traces.

    Waiting is necessary because volumes are released in the background.
    """
    deadline = time.monotonic() + _SETTLE_TIMEOUT_SECONDS
    while not is_expected(traces := take_traces()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return traces


class World(Protocol):
    """A kind of host, with a template that is built once per test run."""

    kind: str
    abilities: Abilities
    host_class: str
    """Dotted name of the host class."""
    halt_command: str
    """A command that stops the machine from inside."""

    def make_config(self, **sections: Any) -> Config:
        """Return a configuration with its own state root, which already contains the template TEMPLATE."""

    def make_host(self, config: Config) -> Host: ...

    def get_environment(self) -> dict[str, str]:
        """Return the variables that a gateway process needs on this host."""

    def read_traces(self, config: Config) -> dict[str, set[str]]:
        """Return the objects on the machine that belong to the gateway of ``config``, by kind (files, processes, …)."""

    def read_properties(self, config: Config) -> list[str]:
        """Return all properties of the datasets and their snapshots. A host without ZFS has none."""

    def clean_up(self, config: Config) -> None:
        """Remove everything that a stopped gateway without sandboxes has left on the machine."""

    def check_no_strays(self, engine: Engine, config: Config, moment: str) -> None:
        """Check that the machine has exactly the objects that the engine knows about."""

    def break_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the next captures fail ("forced") after the machine has been paused."""

    def break_volume_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the next captures fail ("forced") after the first volume has been captured, but before the second."""

    def get_writable_directory(self, config: Config) -> Path:
        """Return the directory in which the gateway of ``config`` may write and mount file systems."""

    def cut_power(self, config: Config) -> None:
        """Stop all machines of a stopped gateway, as if the host had lost power."""

    def damage_snapshots(self, config: Config, *, torn: str, short: str, empty: str) -> None:
        """Truncate the record of ``torn``, damage the image or record of ``short``, and remove ``empty``'s record."""

    def rewrite_record(self, config: Config, snapshot: Snapshot, **fields: Any) -> None:
        """Change fields of a snapshot's record behind the gateway's back."""


class KvmXfsWorld:
    """QEMU on an XFS file system. Each configuration gets its own state root, with a reflink copy of the template."""

    kind = "kvm_xfs"
    abilities = KvmXfsHost.abilities
    host_class = "sandbox_gateway.hosts.kvm_xfs.host.KvmXfsHost"
    halt_command = "echo o >/proc/sysrq-trigger"

    def __init__(self, xfs: Path, cache: Path) -> None:
        self._xfs = xfs
        self._cache = cache
        self._seed_root = xfs / "engine-seed"
        self._seed_root.mkdir(mode=0o711)
        templates.copy_cached_template(self._seed_root, TEMPLATE)
        runner = EngineRunner(self.make_host(seed_config := self._make_config(self._seed_root, {})), seed_config)
        try:
            build = runner.do(runner.engine.templates.build(TEMPLATE, templates.RECIPE))
            lines = runner.follow(build, timeout=900)
            assert build.status == "ready", "\n".join(lines)
            templates.add_to_cache(self._seed_root)
        finally:
            runner.close()
            asyncio.run(SlotPool(seed_config.network).destroy())

    def make_config(self, **sections: Any) -> Config:
        root = self._xfs / f"engine-{next(_config_numbers)}"
        root.mkdir(mode=0o711)
        for name in ("templates", "accelerator.json"):
            if (self._seed_root / name).exists():
                subprocess.run(
                    ["cp", "-a", "--reflink=always", str(self._seed_root / name), str(root)], check=True, timeout=60
                )
        return self._make_config(root, sections)

    def _make_config(self, root: Path, sections: dict[str, Any]) -> Config:
        defaults: dict[str, dict[str, Any]] = {
            "host": {"kind": "kvm_xfs", "state_root": root, "cache_root": self._cache},
            "kvm_xfs": {"uid_base": 700_000},
            "network": {**session.allocate_network(), "pool": 1},
        }
        top_level_values = {key: value for key, value in sections.items() if not isinstance(value, dict)}
        merged_sections = {
            key: defaults.get(key, {}) | sections.get(key, {}) for key in {*defaults, *sections} - {*top_level_values}
        }
        return Config.model_validate(merged_sections | top_level_values)

    def make_host(self, config: Config) -> KvmXfsHost:
        return KvmXfsHost(config)

    def get_environment(self) -> dict[str, str]:
        return {}

    def read_properties(self, config: Config) -> list[str]:
        return []

    def clean_up(self, config: Config) -> None:
        asyncio.run(ServerPool(config.network, Layout(config.host.state_root).serving).destroy())
        asyncio.run(SlotPool(config.network).destroy())
        shutil.rmtree(config.host.state_root)

    def check_no_strays(self, engine: Engine, config: Config, moment: str) -> None:
        sandboxes, snapshots = engine.index.sandboxes.values(), engine.index.snapshots.values()
        running_sandboxes = [sandbox for sandbox in sandboxes if sandbox.state is SandboxState.RUNNING]
        mounted_volumes = {mount.volume for sandbox in running_sandboxes for mount in sandbox.mounts}
        traces = self.read_traces(config)
        disks = {f"sandboxes/{each.id}/{each.instance}" for each in sandboxes if not each.pause_snapshot}
        assert traces["sandboxes"] == disks | {f"sandboxes/{each.id}/manifest.json" for each in sandboxes}, moment
        template_kinds = (SnapshotKind.TEMPLATE, SnapshotKind.BASE)
        assert traces["snapshots"] == {
            f"snapshots/{each.id}" for each in snapshots if each.kind not in template_kinds
        }, moment
        assert len(traces["processes"]) == len(running_sandboxes), (moment, traces, sandboxes)
        volumes = {f"volumes/{each.id}" for each in engine.volumes.list()}
        captures = {f"volumes/{each.volume}/snapshots/{each.id}" for each in engine.index.volume_snapshots.values()}
        assert traces["volumes"] == volumes | captures, moment
        assert traces["servers"] == mounted_volumes, moment
        expected_groups = {
            f"{kind}/{name}"
            for kind, names in (
                ("sandboxes", {each.instance for each in running_sandboxes}),
                ("volumes", mounted_volumes),
            )
            for name in names
        }
        prefix = f"{config.network.prefix}-"
        found_groups = {"/".join(Path(each).parts[-2:]).replace(prefix, "") for each in traces["cgroups"]}
        assert found_groups == expected_groups, moment

    def break_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any) -> None:
            raise BackendFailed("forced")

        monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.ram.Ram.read", refuse)

    def break_volume_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        captured_snapshots: list[PendingSnapshot] = []
        original_clone_image = PendingSnapshot.clone_image

        def refuse_second(pending: PendingSnapshot) -> None:
            captured_snapshots.append(pending)
            if len(captured_snapshots) == 2:
                raise BackendFailed("forced")
            original_clone_image(pending)

        monkeypatch.setattr(PendingSnapshot, "clone_image", refuse_second)

    def get_writable_directory(self, config: Config) -> Path:
        return config.host.state_root

    def cut_power(self, config: Config) -> None:
        machines = list_running_processes(config.host.state_root / "sandboxes", config.network.prefix)
        serving_directory = config.host.state_root / "serving"
        servers = (process for process in _list_processes() if _find_names_below(process, serving_directory))
        for descriptor in [
            *(machine.pidfd for machine in machines),
            *(os.pidfd_open(int(server.name)) for server in servers),
        ]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert select.select([descriptor], [], [], 10)[0]
            os.close(descriptor)

    def damage_snapshots(self, config: Config, *, torn: str, short: str, empty: str) -> None:
        snapshot_directory = config.host.state_root / "snapshots"
        manifest_path = snapshot_directory / torn / "manifest.json"
        manifest_path.write_text(manifest_path.read_text()[:100])
        os.truncate(snapshot_directory / short / "memory.img", 4096)
        shutil.rmtree(snapshot_directory / empty)
        (snapshot_directory / empty).mkdir()

    def rewrite_record(self, config: Config, snapshot: Snapshot, **fields: Any) -> None:
        manifest_path = config.host.state_root / "snapshots" / snapshot.id / "manifest.json"
        manifest_path.write_text(json.dumps(json.loads(manifest_path.read_text()) | fields))

    def read_traces(self, config: Config) -> dict[str, set[str]]:
        root, prefix = config.host.state_root, config.network.prefix
        servers = {
            process: names[0]
            for process in _list_processes()
            if (names := _find_names_below(process, root / "serving"))
        }
        return {
            "volumes": {str(path.relative_to(root)) for path in (root / "volumes").glob("*")}
            | {str(path.relative_to(root)) for path in (root / "volumes").glob("*/snapshots/*")},
            "servers": set(servers.values()),
            "sandboxes": {str(path.relative_to(root)) for path in (root / "sandboxes").glob("*/*")},
            "snapshots": {str(path.relative_to(root)) for path in (root / "snapshots").glob("*")},
            "templates": {str(path.relative_to(root)) for path in (root / "templates").glob("*")},
            "processes": {
                process.name
                for process in _list_processes()
                if process not in servers and _find_names_below(process, root)
            },
            # os.walk ignores groups that are removed during the walk.
            "cgroups": {
                directory for directory, _, _ in os.walk("/sys/fs/cgroup") if prefix in Path(directory).parent.name
            },
        }


def _list_processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _find_names_below(process: Path, root: Path) -> list[str]:
    """Return the names directly under ``root`` that occur in the command line of a process."""
    try:
        return re.findall(rf"{re.escape(str(root))}/([^/\0]+)", (process / "cmdline").read_text(errors="replace"))
    except OSError:
        return []
