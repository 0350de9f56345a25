"""Kinds of host for the engine's suite: set-up, observation from outside, and faults."""

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
from sandbox_gateway.hosts.kvm_xfs.host import KvmXfsHost
from sandbox_gateway.hosts.kvm_xfs.image.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import list_running
from sandbox_gateway.hosts.kvm_xfs.volumes.pending_snapshots import PendingSnapshot
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import SandboxState, Snapshot, SnapshotKind
from tests.support import session, templates
from tests.support.live import Live

TEMPLATE = "plain"
_numbers = itertools.count(1)
_SETTLE_SECONDS = 20

Traces = dict[str, set[str]]


def wait_for_traces(look: Callable[[], Traces], right: Callable[[Traces], bool]) -> Traces:
    """Return the traces once they are ``right``, or after a timeout: the release of a volume runs in the background."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not right(found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class World(Protocol):
    """One kind of host, with a template that is built once for the run."""

    kind: str
    abilities: Abilities
    factory: str
    """Dotted name of the host's class."""
    halt: str
    """A command that ends the machine from inside."""

    def config(self, **sections: Any) -> Config:
        """A configuration with its own state, which already holds the template TEMPLATE."""

    def host(self, config: Config) -> Host: ...

    def traces(self, config: Config) -> dict[str, set[str]]:
        """Everything that the gateway of ``config`` has on the machine, by kind: files, processes, networks, …"""

    def forget(self, config: Config) -> None:
        """Remove everything that an empty, stopped gateway keeps on the machine."""

    def check_no_strays(self, engine: Engine, config: Config, when: str) -> None:
        """The machine has exactly the objects that the engine knows."""

    def break_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the next captures fail ("forced") after the machine was stopped."""

    def break_volume_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the next captures fail ("forced") after their first volume is captured, but before the second."""

    def territory(self, config: Config) -> Path:
        """The places on the machine where the gateway of ``config`` may write and mount."""

    def power_cut(self, config: Config) -> None:
        """End every machine of a stopped gateway, as when the host loses power."""

    def damage(self, config: Config, *, torn: str, short: str, empty: str) -> None:
        """Damage three snapshots: tear one's record, truncate another (its image or record), and empty the third."""

    def rewrite(self, config: Config, snapshot: Snapshot, **fields: Any) -> None:
        """Change fields of a snapshot's record behind the gateway's back."""


class KvmXfsWorld:
    """QEMU on an XFS: a state root per test, the template's files copied by reflink."""

    kind = "kvm_xfs"
    abilities = KvmXfsHost.abilities
    factory = "sandbox_gateway.hosts.kvm_xfs.host.KvmXfsHost"
    halt = "echo o >/proc/sysrq-trigger"

    def __init__(self, xfs: Path, cache: Path) -> None:
        self._xfs = xfs
        self._cache = cache
        self._seed = xfs / "engine-seed"
        self._seed.mkdir(mode=0o711)
        templates.copy_cached(self._seed, TEMPLATE)
        live = Live(self.host(seed := self._config(self._seed, {})), seed)
        try:
            build = live.do(live.engine.templates.build(TEMPLATE, templates.RECIPE))
            lines = live.do(_parse_lines(build.follow()), timeout=900)
            assert build.status == "ready", "\n".join(lines)
            templates.add_to_cache(self._seed)
        finally:
            live.close()
            asyncio.run(SlotPool(seed.network).destroy())

    def config(self, **sections: Any) -> Config:
        root = self._xfs / f"engine-{next(_numbers)}"
        root.mkdir(mode=0o711)
        for name in ("templates", "accelerator.json"):
            if (self._seed / name).exists():
                subprocess.run(
                    ["cp", "-a", "--reflink=always", str(self._seed / name), str(root)], check=True, timeout=60
                )
        return self._config(root, sections)

    def _config(self, root: Path, sections: dict[str, Any]) -> Config:
        own: dict[str, dict[str, Any]] = {
            "host": {"kind": "kvm_xfs", "state_root": root, "cache_root": self._cache},
            "kvm_xfs": {"uid_base": 700_000},
            "network": {**session.network(), "pool": 1},
        }
        plain = {key: value for key, value in sections.items() if not isinstance(value, dict)}
        merged = {key: own.get(key, {}) | sections.get(key, {}) for key in {*own, *sections} - {*plain}}
        return Config.model_validate(merged | plain)

    def host(self, config: Config) -> KvmXfsHost:
        return KvmXfsHost(config)

    def forget(self, config: Config) -> None:
        asyncio.run(ServerPool(config.network, Layout(config.host.state_root).serving).destroy())
        asyncio.run(SlotPool(config.network).destroy())
        shutil.rmtree(config.host.state_root)

    def check_no_strays(self, engine: Engine, config: Config, when: str) -> None:
        sandboxes, snapshots = engine.index.sandboxes.values(), engine.index.snapshots.values()
        running = [sandbox for sandbox in sandboxes if sandbox.state is SandboxState.RUNNING]
        mounted = {mount.volume for sandbox in running for mount in sandbox.mounts}
        found = self.traces(config)
        disks = {f"sandboxes/{each.id}/{each.instance}" for each in sandboxes if not each.pause_snapshot}
        assert found["sandboxes"] == disks | {f"sandboxes/{each.id}/manifest.json" for each in sandboxes}, when
        built = (SnapshotKind.TEMPLATE, SnapshotKind.BASE)
        assert found["snapshots"] == {f"snapshots/{each.id}" for each in snapshots if each.kind not in built}, when
        assert len(found["processes"]) == len(running), (when, found, sandboxes)
        volumes = {f"volumes/{each.id}" for each in engine.volumes.list()}
        captures = {f"volumes/{each.volume}/snapshots/{each.id}" for each in engine.index.volume_snapshots.values()}
        assert found["volumes"] == volumes | captures, when
        assert found["servers"] == mounted, when
        groups = {
            f"{kind}/{name}"
            for kind, names in (("sandboxes", {each.instance for each in running}), ("volumes", mounted))
            for name in names
        }
        kinds = (f"{config.network.prefix}-", "")
        assert {"/".join(Path(each).parts[-2:]).replace(*kinds) for each in found["cgroups"]} == groups, when

    def break_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any) -> None:
            raise BackendFailed("forced")

        monkeypatch.setattr("sandbox_gateway.hosts.kvm_xfs.memory.ram.Ram.read", refuse)

    def break_volume_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[PendingSnapshot] = []
        genuine = PendingSnapshot.clone_image

        def refuse_the_second(recording: PendingSnapshot) -> None:
            taken.append(recording)
            if len(taken) == 2:
                raise BackendFailed("forced")
            genuine(recording)

        monkeypatch.setattr(PendingSnapshot, "clone_image", refuse_the_second)

    def territory(self, config: Config) -> Path:
        return config.host.state_root

    def power_cut(self, config: Config) -> None:
        machines = [pid for pid, _, _ in list_running(str(config.host.state_root / "sandboxes"))]
        serving = config.host.state_root / "serving"
        for pid in [*machines, *(int(process.name) for process in _processes() if _under(process, serving))]:
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert select.select([descriptor], [], [], 10)[0]
            os.close(descriptor)

    def damage(self, config: Config, *, torn: str, short: str, empty: str) -> None:
        snapshots = config.host.state_root / "snapshots"
        manifest = snapshots / torn / "manifest.json"
        manifest.write_text(manifest.read_text()[:100])
        os.truncate(snapshots / short / "memory.img", 4096)
        shutil.rmtree(snapshots / empty)
        (snapshots / empty).mkdir()

    def rewrite(self, config: Config, snapshot: Snapshot, **fields: Any) -> None:
        manifest = config.host.state_root / "snapshots" / snapshot.id / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))

    def traces(self, config: Config) -> dict[str, set[str]]:
        root, prefix = config.host.state_root, config.network.prefix
        servers = {process: named[0] for process in _processes() if (named := _under(process, root / "serving"))}
        return {
            "volumes": {str(path.relative_to(root)) for path in (root / "volumes").glob("*")}
            | {str(path.relative_to(root)) for path in (root / "volumes").glob("*/snapshots/*")},
            "servers": set(servers.values()),
            "sandboxes": {str(path.relative_to(root)) for path in (root / "sandboxes").glob("*/*")},
            "snapshots": {str(path.relative_to(root)) for path in (root / "snapshots").glob("*")},
            "templates": {str(path.relative_to(root)) for path in (root / "templates").glob("*")},
            "processes": {process.name for process in _processes() if process not in servers and _under(process, root)},
            # os.walk ignores groups that vanish meanwhile.
            "cgroups": {place for place, _, _ in os.walk("/sys/fs/cgroup") if prefix in Path(place).parent.name},
        }


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _under(process: Path, root: Path) -> list[str]:
    """The names directly below ``root`` that a process has in its command line."""
    try:
        return re.findall(rf"{re.escape(str(root))}/([^/\0]+)", (process / "cmdline").read_text(errors="replace"))
    except OSError:
        return []


async def _parse_lines(lines: Any) -> list[str]:
    return [line async for line in lines]
