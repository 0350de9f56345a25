"""Measure the startup, requests, memory and idle CPU usage of a gateway on a jail host with up to 1,000 snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zfs_core

from benchmarks.benches.scale import LOG_SETTINGS, make_settings, measure_sizes
from benchmarks.context import Context
from benchmarks.measure import Result
from sandbox_gateway.hosts.jail_zfs.storage.property_codec import RECORD_PROPERTY, encode
from sandbox_gateway.hosts.jail_zfs.storage.root import CONTAINERS, SANDBOXES, TEMPLATE_PREFIX
from sandbox_gateway.hosts.jail_zfs.storage.volume_scan import VOLUME_SCAN_PROPERTIES
from sandbox_gateway.records import MemoryMode, Sandbox, SandboxState, Snapshot
from tests.support import pools, session
from tests.support.gateway import Gateway
from tests.support.jail_world import emulated_freebsd, make_shim_environment

_SIZES = (100, 300, 1_000)
_QUICK_SIZES = (20, 50)
_POOL_MB = 2048
_NOTE = (
    "the records are written directly, as properties of empty datasets and snapshots. The snapshots form one chain, "
    "and every fifth has a stopped sandbox. No jails run. ZFS is zfs-fuse. The floor of a start is the time of the two "
    "`zfs get` commands that read all properties; the floor of a request is a request for an empty list"
)


class JailScale:
    name = "jail_scale"
    title = "100 to 1,000 snapshots on a jail host"

    def run(self, ctx: Context) -> Result:
        result = Result(self.name, self.title, make_settings(ctx, _SIZES, _QUICK_SIZES), notes=[_NOTE])
        directory = session.get_run_dir()
        with (
            pools.pool(f"t{session.get_run_id()}s", directory, megabytes=_POOL_MB) as pool,
            emulated_freebsd(),
        ):
            dataset = f"{pool.name}/scale"
            sections = {"host": {"kind": "jail_zfs"}, "jail_zfs": {"dataset": dataset}, "log": LOG_SETTINGS}
            state_directory = directory / "jail-scale"
            state_directory.mkdir()
            measure_sizes(
                ctx,
                result,
                Gateway(state_directory, sections, make_shim_environment()),
                _ZfsStore(dataset),
                floor_title="read the properties only",
                start_limit_ms=None,
                largest_size=_SIZES[-1],
            )
        return result


class _ZfsStore:
    """Stores records in the properties of datasets and snapshots.

    All snapshots belong to one sandbox. Nothing is mounted, because zfs-fuse needs a long time for each mount.
    """

    snapshot_fields: Mapping[str, Any] = {"memory": MemoryMode.NONE, "pause_ms": 0.5}
    sandbox_host: Mapping[str, Any] = {"jail": "bench", "address": "10.0.0.1"}

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._source = Sandbox(name="source", state=SandboxState.PAUSED)
        zfs_core.lzc_create(dataset, mounted=True)
        for name in CONTAINERS:
            zfs_core.lzc_create(f"{dataset}/{name}", props={"atime": "off"}, mounted=True)

    def write_template(self, template: Snapshot) -> None:
        template.memory = MemoryMode.NONE
        dataset = f"{self._dataset}/{TEMPLATE_PREFIX}{template.id}"
        zfs_core.lzc_create(dataset, props={"canmount": "noauto"})
        zfs_core.lzc_snapshot([f"{dataset}@base"], encode(template, 1))
        self._source.template_id = self._source.forked_from = self._source.head = self._source.base = template.id
        self._clone(self._source, f"{dataset}@base")

    def write_snapshot(self, snapshot: Snapshot) -> None:
        snapshot.source_sandbox = snapshot.origin_sandbox = self._source.id
        zfs_core.lzc_snapshot([self._make_name(snapshot)], encode(snapshot, 1))

    def write_sandbox(self, sandbox: Sandbox, head: Snapshot) -> None:
        self._clone(sandbox, self._make_name(head))

    def _make_name(self, snapshot: Snapshot) -> str:
        return f"{self._dataset}/{SANDBOXES}/{self._source.instance}@{snapshot.id}"

    def _clone(self, sandbox: Sandbox, origin: str) -> None:
        """Create the dataset of a sandbox, with its record."""
        options = {"canmount": "noauto", RECORD_PROPERTY: encode(sandbox, 1)[RECORD_PROPERTY]}
        zfs_core.lzc_clone(f"{self._dataset}/{SANDBOXES}/{sandbox.instance}", origin, options)

    def read_all(self) -> object:
        """Read all properties, as the gateway does at startup."""
        return zfs_core.get_tree(self._dataset, VOLUME_SCAN_PROPERTIES), zfs_core.local_tree(self._dataset)
