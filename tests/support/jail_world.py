"""A jail/ZFS host for engine tests, with FreeBSD commands emulated on Linux, real ZFS, and Debian in the jails."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zfs_core
from zfs_core import snapshots

from sandbox_gateway.config import Config
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.hosts.jail_zfs.host import JailZfsHost
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY, encode
from sandbox_gateway.hosts.kvm_xfs.template import apt
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Resources, SandboxState, Snapshot
from tests.freebsd_shim import command_lines
from tests.freebsd_shim.harness import BIN_DIRECTORY
from tests.support import pools, session
from tests.support.live import EngineRunner
from tests.support.worlds import TEMPLATE

STATE_VARIABLE = "FREEBSD_SHIM_STATE"
SHIM_DIRECTORY = "shim"
"""The shim's state directory, relative to the directory of the test run."""
_PACKAGES = ("iproute2", "procps", "python3")
_SUITE = "bookworm"
PF_RULES = 'set skip on lo0\nnat-anchor "sbx/*"\nanchor "sbx/*"\n'
_config_numbers = itertools.count(1)


def make_shim_environment(state: Path | None = None) -> dict[str, str]:
    """Return an environment with the emulated FreeBSD commands first on PATH."""
    return {
        "PATH": f"{BIN_DIRECTORY}:{os.environ['PATH']}:/usr/sbin:/sbin",
        STATE_VARIABLE: str(state or os.environ[STATE_VARIABLE]),
    }


class ShimHost(JailZfsHost):
    """The real host class, which runs the commands of the FreeBSD shim."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, environment=make_shim_environment())


def run_shim(*argv: str, input: str | None = None, check: bool = True, state: Path | None = None) -> str:
    """Run an emulated FreeBSD command, and return its standard output."""
    env = {**os.environ, **make_shim_environment(state)}
    result = subprocess.run(argv, input=input, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert not check or result.returncode == 0, (argv, result)
    return result.stdout


def get_debian_tarball() -> Path:
    """Return the path of a cached tarball of Debian with Python, which is created on first use."""
    sources = apt.read_host_sources(_SUITE)
    digest = hashlib.sha256(json.dumps([_SUITE, _PACKAGES, sources]).encode()).hexdigest()[:16]
    tarball = session.get_cache_dir() / f"jail-{digest}.tar"
    if not tarball.exists():
        sources_file, temporary_tarball = session.get_run_dir() / "jail.sources", session.get_run_dir() / "jail.tar"
        sources_file.write_text(sources)
        exclusions = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
        argv = ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]
        argv += ["mmdebstrap", "--quiet", "--mode=root"]
        argv += ["--variant=minbase", "--format=tar", f"--include={','.join(_PACKAGES)}", *exclusions]
        argv += [f"--aptopt={option}" for option in asyncio.run(apt.read_apt_options())]
        argv += ["--", _SUITE, str(temporary_tarball), *([str(sources_file)] if sources else [])]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        temporary_tarball.rename(tarball)
    return tarball


@contextmanager
def jail_zfs_world() -> Iterator[JailZfsWorld]:
    """Create a world with a private pool and a private state of the FreeBSD shim, and remove both at the end."""
    with (
        pools.pool(f"t{session.get_run_id()}w", session.get_run_dir(), megabytes=6144) as pool,
        opened_world(pool) as world,
    ):
        yield world


@contextmanager
def opened_world(pool: pools.Pool) -> Iterator[JailZfsWorld]:
    with emulated_freebsd(), command_lines.checked():
        yield JailZfsWorld(pool)


@contextmanager
def emulated_freebsd() -> Iterator[None]:
    """Give the FreeBSD shim its own state and the rules of a jail host inside the context."""
    previous_state = os.environ.get(STATE_VARIABLE)
    os.environ[STATE_VARIABLE] = str(session.get_run_dir() / SHIM_DIRECTORY)
    try:
        run_shim("pfctl", "-q", "-f", "-", input=PF_RULES)
        try:
            yield
        finally:
            run_shim("freebsd-shim", "purge")
    finally:
        os.environ.pop(STATE_VARIABLE)
        if previous_state is not None:
            os.environ[STATE_VARIABLE] = previous_state


class JailZfsWorld:
    """Jails on one pool. Each configuration gets its own root dataset, with a clone of the template's dataset."""

    kind = "jail_zfs"
    abilities = JailZfsHost.abilities
    host_class = "tests.support.jail_world.ShimHost"
    halt_command = "kill -KILL -1"

    def __init__(self, pool: pools.Pool) -> None:
        self._pool = pool
        seed_config = self._make_config("seed", {})
        runner = EngineRunner(self.make_host(seed_config), seed_config)
        try:
            recipe = Recipe(
                source="rootfs", path=str(get_debian_tarball()), resources=Resources(memory_mb=256, disk_mb=2048)
            )
            build = runner.do(runner.engine.templates.build(TEMPLATE, recipe))
            lines = runner.follow(build, timeout=900)
            assert build.status == "ready", "\n".join(lines)
            self._template = runner.engine.templates.get(TEMPLATE)
        finally:
            runner.close()

    def make_config(self, **sections: Any) -> Config:
        config = self._make_config(f"w{next(_config_numbers)}", sections)
        dataset = f"{config.jail_zfs.dataset}/_template-{self._template.id}"
        record = self._template.model_copy(update={"host": {}})
        zfs_core.lzc_clone(dataset, self._template.host["zfsSnapshot"], {"canmount": "noauto"})
        zfs_core.lzc_snapshot([f"{dataset}@base"], encode(record, 1))
        return config

    def _make_config(self, name: str, sections: dict[str, Any]) -> Config:
        dataset = f"{self._pool.name}/{name}"
        zfs_core.lzc_create(dataset, mounted=True)
        state = session.get_run_dir() / f"jail-{name}"
        state.mkdir(mode=0o711)
        defaults: dict[str, dict[str, Any]] = {
            "host": {"kind": "jail_zfs", "state_root": state, "cache_root": session.get_cache_dir()},
            "jail_zfs": {"dataset": dataset},
            "network": session.allocate_network(),
        }
        top_level_values = {key: value for key, value in sections.items() if not isinstance(value, dict)}
        merged_sections = {
            key: defaults.get(key, {}) | sections.get(key, {}) for key in {*defaults, *sections} - {*top_level_values}
        }
        return Config.model_validate(merged_sections | top_level_values)

    def make_host(self, config: Config) -> Host:
        return ShimHost(config)

    def get_environment(self) -> dict[str, str]:
        return make_shim_environment()

    def clean_up(self, config: Config) -> None:
        self.cut_power(config)
        prefix = config.network.prefix
        run_shim("ifconfig", f"{prefix}br", "destroy", check=False)
        run_shim("pfctl", "-q", "-a", f"sbx/{prefix}", "-F", "all")
        # Datasets that are still mounted in another mount namespace are removed with the pool.
        for _ in range(40):
            if pools.run("zfs", "destroy", "-R", config.jail_zfs.dataset, check=False).returncode == 0:
                break
            time.sleep(0.05)
        subprocess.run(["rm", "-r", str(config.host.state_root)], check=True, timeout=60)

    # -- observation ------------------------------------------------------------------------------------------------

    def get_mount_point(self, config: Config) -> Path:
        return self._pool.mount_point / config.jail_zfs.dataset.partition("/")[2]

    def read_traces(self, config: Config) -> dict[str, set[str]]:
        root, prefix, mount_point = config.jail_zfs.dataset, config.network.prefix, self.get_mount_point(config)
        mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
        properties_by_name = zfs_core.get_tree(root, ("defer_destroy", "type"))
        # A process belongs to the jail with its root directory. A dataset that is too busy to be retired stays in
        # place, unmounted, until the next scan. So does the previous dataset of a rolled-back volume, until its last
        # snapshot is removed.
        retired_names = {
            name
            for name in properties_by_name
            if name.startswith((f"{root}/sandboxes/", f"{root}/volumes/"))
            if f"{mount_point}{name.removeprefix(root)}" not in mounts
        }
        return {
            "datasets": {
                name.removeprefix(root) for name in properties_by_name if "@" not in name and name not in retired_names
            },
            "snapshots": {
                name.partition("@")[2]
                for name, properties in properties_by_name.items()
                if "@" in name and not properties["defer_destroy"].is_on
            },
            "jails": set(self.list_jail_names(config)),
            "processes": {path.name for path in Path("/proc").iterdir() if _is_within(path, mount_point)},
            "epairs": set(run_shim("ifconfig", "-g", f"{prefix}-epair", check=False).split()),
            "limits": {line for line in run_shim("rctl").split() if f":{prefix}-" in line},
            "anchors": set(re.findall(rf"sbx/{prefix}-\S+", run_shim("pfctl", "-a", "sbx", "-s", "Anchors"))),
            "mounts": {mount for mount in mounts if mount.startswith(f"{mount_point}/")},
            "identities": {path.name for path in (config.host.state_root / "run").glob("*")},
        }

    def read_properties(self, config: Config) -> list[str]:
        zfs_core.sync(config.jail_zfs.dataset)
        output = pools.run("zfs", "get", "-Hrp", "-o", "name,property,value,source", "all", config.jail_zfs.dataset)
        # How much space is available depends on everything else in the pool. The time of the last snapshot also changes
        # when a temporary snapshot shows whether a sandbox has diverged (docs/plans.md).
        ignored = ("available", "snapshots_changed")
        return [line for line in output.stdout.splitlines() if line.split("\t")[1] not in ignored]

    def list_jail_names(self, config: Config) -> list[str]:
        mount_point = str(self.get_mount_point(config))
        rows = json.loads(run_shim("jls", "--libxo", "json", "-d", "name", "path"))["jail-information"]["jail"]
        return [row["name"] for row in rows if row["path"].startswith(f"{mount_point}/")]

    def check_no_strays(self, engine: Engine, config: Config, moment: str) -> None:
        traces = self.read_traces(config)
        sandboxes = list(engine.index.sandboxes.values())
        running_sandboxes = [sandbox for sandbox in sandboxes if sandbox.state is SandboxState.RUNNING]
        instance_datasets = {f"/sandboxes/{each.instance}" for each in sandboxes}
        mounted_names = {
            name for name in traces["datasets"] if f"{self.get_mount_point(config)}{name}" in traces["mounts"]
        }
        assert {name for name in mounted_names if name.startswith("/sandboxes/")} == instance_datasets, moment
        volume_datasets = {each.host["dataset"].removeprefix(config.jail_zfs.dataset) for each in engine.volumes.list()}
        assert {name for name in mounted_names if name.startswith("/volumes/")} == volume_datasets, moment
        expected_snapshots = {each.host["zfsSnapshot"].partition("@")[2] for each in engine.index.snapshots.values()}
        assert traces["snapshots"] == expected_snapshots | set(engine.index.volume_snapshots), moment
        expected_mounts = {
            (f"{self.get_mount_point(config)}/sandboxes/{sandbox.instance}{mount.path}", mount.volume, mount.read_only)
            for sandbox in running_sandboxes
            for mount in sandbox.mounts
        }
        mounts = self.list_volume_mounts(config)
        assert mounts == expected_mounts, (moment, mounts, expected_mounts)
        for kind in ("jails", "epairs", "anchors", "identities"):
            assert len(traces[kind]) == len(running_sandboxes), (moment, kind, traces[kind])
        assert len(traces["limits"]) == 5 * len(running_sandboxes), (moment, traces["limits"])

    def get_writable_directory(self, config: Config) -> Path:
        return self.get_mount_point(config)

    def list_volume_mounts(self, config: Config) -> set[tuple[str, str, bool]]:
        """Return ``(path, volume id, whether read-only)`` for each volume that is mounted in a jail."""
        rows = json.loads(run_shim("mount", "--libxo", "json", "-v", "-t", "nullfs"))["mount"].get("mounted", [])
        volume_prefix = f"{self.get_mount_point(config)}/volumes/"
        return {
            (row["node"], row["special"].removeprefix(volume_prefix).partition(".")[0], "read-only" in row["opts"])
            for row in rows
            if row["special"].startswith(volume_prefix)
        }

    # -- faults -----------------------------------------------------------------------------------------------------

    def break_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any) -> None:
            raise BackendFailed("forced")

        monkeypatch.setattr("zfs_core.lzc_snapshot", refuse)

    def break_volume_capture(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the next capture fail after its first snapshots, or at its only call if it takes them all in one."""
        take_snapshots = snapshots._snapshot_atomically
        captured_names: list[str] = []

        def refuse(names: Sequence[str], options: Sequence[str]) -> None:
            if captured_names or len(names) > 1:
                raise zfs_core.exceptions.ZFSGenericError(5, names[0], "forced")
            captured_names.extend(names)
            take_snapshots(names, options)

        monkeypatch.setattr(snapshots, "_snapshot_atomically", refuse)

    def cut_power(self, config: Config) -> None:
        prefix = config.network.prefix
        traces = self.read_traces(config)
        for name in traces["jails"]:
            run_shim("pkill", "-KILL", "-j", name, check=False)
            run_shim("jail", "-R", name, check=False)
        for name in traces["epairs"]:
            run_shim("ifconfig", name, "destroy")
        for line in traces["limits"]:
            run_shim("rctl", "-r", ":".join(line.split(":")[:2]), check=False)
        for name in traces["anchors"]:
            run_shim("pfctl", "-q", "-a", name, "-F", "all")
        dataset_mounts = {f"{self.get_mount_point(config)}{name}" for name in traces["datasets"]}
        for node in sorted(self.read_traces(config)["mounts"], reverse=True):
            if node not in dataset_mounts and not node.endswith("/dev/pts"):
                run_shim("umount", "-f", node)
        for name in traces["datasets"]:
            if name.startswith(("/sandboxes/", "/volumes/")):
                zfs_core.unmount(f"{config.jail_zfs.dataset}{name}")
        run_shim("ifconfig", f"{prefix}br", "destroy", check=False)

    def _find_full_name(self, config: Config, snapshot_id: str) -> str:
        full_names = zfs_core.list_datasets(config.jail_zfs.dataset, types="snapshot")
        return next(name for name in full_names if name.endswith(f"@{snapshot_id}"))

    def damage_snapshots(self, config: Config, *, torn: str, short: str, empty: str) -> None:
        name = self._find_full_name(config, torn)
        zfs_core.lzc_set_prop(name, RECORD_PROPERTY, zfs_core.local_props(name)[RECORD_PROPERTY][:100])
        zfs_core.lzc_set_prop(
            self._find_full_name(config, short), RECORD_PROPERTY, '{"v":1,"kind":"snapshot","generation":9,"parts":2}'
        )
        zfs_core.lzc_inherit_prop(self._find_full_name(config, empty), RECORD_PROPERTY)

    def rewrite_record(self, config: Config, snapshot: Snapshot, **fields: Any) -> None:
        name = self._find_full_name(config, snapshot.id)
        head = json.loads(zfs_core.local_props(name)[RECORD_PROPERTY])
        head["record"] |= fields
        zfs_core.lzc_set_prop(name, RECORD_PROPERTY, json.dumps(head))


def _is_within(process: Path, directory: Path) -> bool:
    """Return whether the root directory of a process, or its working directory, is under ``directory``."""
    try:
        return process.name.isdigit() and any(
            str((process / link).readlink()).startswith(f"{directory}/") for link in ("root", "cwd")
        )
    except OSError:
        return False
