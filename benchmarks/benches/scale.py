"""Measure the startup, requests, memory and idle CPU usage of a gateway with up to 10,000 snapshots."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from benchmarks.context import Context
from benchmarks.cpu_time import read_cpu_ms
from benchmarks.measure import Result, Target
from benchmarks.timers import time_call
from sandbox_gateway.hosts.kvm_xfs import record_files
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, SandboxState, Snapshot, SnapshotKind, now
from tests.support import session
from tests.support.gateway import Gateway
from tests.support.xfs import LoopXfs

_SIZES = (100, 300, 1_000, 3_000, 10_000)
_QUICK_SIZES = (30, 100)
SNAPSHOTS_PER_SANDBOX = 5
_PAGE_SIZE = 100
_XFS_MB = 4096
LOG_SETTINGS = {"level": "info", "format": "json"}
"""Settings that make a gateway log how long its startup takes."""
_IDLE_SECONDS = 10.0
_START_LIMIT_MS, _PAGE_LIMIT_MS, _MEMORY_LIMIT_BYTES = 2000, 20, 120 << 20
_NOTE = (
    "the records are written directly, together with reflinks of the same images. The snapshots form one chain, and "
    "every fifth has a stopped sandbox. No machines run. The floor of a start is the time to read and parse the same "
    "manifests; the floor of a request is a request for an empty list"
)
_REQUESTS = {
    "page": f"list page of {_PAGE_SIZE} snapshots",
    "show": "show a snapshot, by name",
    "find": "list with the filter name",
    "sandboxes": f"list page of {_PAGE_SIZE} sandboxes",
    "lineage": "the whole lineage, as a list",
    "metrics": "metrics",
}


class Scale:
    name = "scale"
    title = "100 to 10,000 snapshots"

    def run(self, ctx: Context) -> Result:
        result = Result(self.name, self.title, make_settings(ctx, _SIZES, _QUICK_SIZES), notes=[_NOTE])
        directory = session.get_run_dir()
        with LoopXfs(directory / "scale.xfs", directory / "scale", size_mb=_XFS_MB) as xfs:
            gateway = Gateway(xfs.mount_point, {"log": LOG_SETTINGS})
            store = _XfsStore(Layout(gateway.state_root), xfs.mount_point / "images")
            measure_sizes(
                ctx,
                result,
                gateway,
                store,
                floor_title="read the manifests only",
                start_limit_ms=_START_LIMIT_MS,
                largest_size=_SIZES[-1],
            )
        return result


def make_settings(ctx: Context, sizes: Sequence[int], quick_sizes: Sequence[int]) -> dict[str, Any]:
    """Return the settings of a bench that ``measure_sizes`` carries out."""
    return {
        "snapshots": list(quick_sizes if ctx.quick else sizes),
        "per_sandbox": SNAPSHOTS_PER_SANDBOX,
        "starts": ctx.choose(full=5, quick=2),
        "rounds": ctx.choose(full=30, quick=3),
    }


def measure_sizes(
    ctx: Context,
    result: Result,
    gateway: Gateway,
    store: Store,
    *,
    floor_title: str,
    start_limit_ms: float | None,
    largest_size: int,
) -> None:
    """Write more and more records to ``store``, and add the measures of ``gateway`` with each number of snapshots."""
    settings = result.settings
    records = Records(store)
    with ctx.showing_progress("sizes", len(settings["snapshots"])) as steps:
        for size in settings["snapshots"]:
            records.grow(size)
            samples = _collect_samples(gateway, records, starts=settings["starts"], rounds=settings["rounds"])
            _add_measures(
                result,
                size,
                samples,
                floor_title=floor_title,
                start_limit_ms=start_limit_ms,
                is_largest=size == largest_size,
            )
            steps.advance()
    gateway.client.close()


class Store(Protocol):
    """The place to which the records of a host are written."""

    snapshot_fields: Mapping[str, Any]
    """The fields of snapshots that depend on the kind of host."""
    sandbox_host: Mapping[str, Any]
    """The field ``host`` of sandboxes."""

    def write_template(self, template: Snapshot) -> None: ...

    def write_snapshot(self, snapshot: Snapshot) -> None: ...

    def write_sandbox(self, sandbox: Sandbox, head: Snapshot) -> None: ...

    def read_all(self) -> object:
        """Read all records without the gateway."""


class Records:
    """The records in a store: a template, a chain of snapshots, and stopped sandboxes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._start_time = now() - timedelta(days=30)
        self.snapshot_ids: list[str] = []
        """The ids of all snapshots, oldest first."""
        self.unused_ids: list[str] = []
        """The ids of some snapshots that have no sandboxes and are not the newest."""
        self._snapshot_count = self._sandbox_count = 0
        self._template = Snapshot(
            kind=SnapshotKind.TEMPLATE, names=["base"], memory=MemoryMode.FULL, created_at=self._start_time
        )
        store.write_template(self._template)

    def grow(self, count: int) -> None:
        """Create snapshots and sandboxes until there are ``count`` snapshots."""
        while len(self.snapshot_ids) < count:
            number = self._snapshot_count
            self._snapshot_count += 1
            created_at = self._start_time + timedelta(minutes=number + 1)
            snapshot = Snapshot(
                names=[f"snapshot-{number}"],
                template_id=self._template.id,
                parent=self.snapshot_ids[-1] if self.snapshot_ids else self._template.id,
                origin=self._template.id,
                disk_bytes_unique=1 << 20,
                created_at=created_at,
                updated_at=created_at,
                **self.store.snapshot_fields,
            )
            self.store.write_snapshot(snapshot)
            self.snapshot_ids.append(snapshot.id)
            if number % SNAPSHOTS_PER_SANDBOX == 0:
                self._create_sandbox(snapshot)
            elif number % SNAPSHOTS_PER_SANDBOX == 1 and len(self.snapshot_ids) < count:
                self.unused_ids.append(snapshot.id)

    def _create_sandbox(self, snapshot: Snapshot) -> None:
        number = self._sandbox_count
        self._sandbox_count += 1
        sandbox = Sandbox(
            name=f"sandbox-{number}",
            state=SandboxState.PAUSED,
            template_id=self._template.id,
            forked_from=snapshot.id,
            head=snapshot.id,
            base=snapshot.id,
            metadata={"team": f"team-{number % 10}"},
            created_at=snapshot.created_at,
            host={**self.store.sandbox_host, "number": number},
        )
        self.store.write_sandbox(sandbox, snapshot)

    def pop_unused_id(self) -> str:
        """Return the id of a snapshot in the middle of the chain, or an empty string if none is left.

        The caller must delete the snapshot.
        """
        if not self.unused_ids:
            return ""
        ident = self.unused_ids.pop(len(self.unused_ids) // 2)
        self.snapshot_ids.remove(ident)
        return ident


_PLATFORM = {"accelerator": "tcg", "cpu_model": "max", "machine": "q35", "qemu_version": "7.2"}


class _XfsStore:
    """Stores records as manifests in a state root, each with reflinks of the same images."""

    snapshot_fields: Mapping[str, Any] = {
        "memory": MemoryMode.SOFT_DIRTY,
        "memory_bytes_written": 1 << 20,
        "pause_ms": 10.5,
        "host": {
            "platform": _PLATFORM,
            "phases_ms": {"stop": 1.5, "devices": 2.5, "disk": 2.5, "pages": 3.5, "continue": 0.5},
            "stops_ms": [10.5],
            "line": True,
        },
    }
    sandbox_host: Mapping[str, Any] = {"slot": 0, "pid": 0, "address": "10.0.0.1", "platform": _PLATFORM}

    def __init__(self, layout: Layout, images: Path) -> None:
        self._layout = layout
        self._images = images
        layout.create()
        images.mkdir(mode=0o700)
        for name in ("kernel", "initrd", "device.state"):
            (images / name).write_bytes(bytes(4096))
        for name, size_mb in (("rootfs.img", Resources().disk_mb), ("memory.img", Resources().memory_mb)):
            with (images / name).open("wb") as file:
                file.write(b"x" * (1 << 20))
                file.truncate(size_mb << 20)

    def write_template(self, template: Snapshot) -> None:
        self.write_snapshot(template)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        files = self._layout.snapshot(snapshot)
        files.directory.mkdir(mode=0o700)
        for path in (files.disk, files.memory, files.device_state):
            reflink.clone(self._images / path.name, path)
        for path in (files.kernel, files.initrd):
            path.hardlink_to(self._images / path.name)
        record_files.write_record(files.directory, snapshot, durable=False)

    def write_sandbox(self, sandbox: Sandbox, head: Snapshot) -> None:
        sandbox.host["slot"] = sandbox.host.pop("number")
        directory = self._layout.sandbox(sandbox)
        directory.mkdir(mode=0o711)
        files = InstanceFiles(directory / sandbox.instance)
        files.directory.mkdir(mode=0o711)
        files.run.mkdir(mode=0o700)
        reflink.clone(self._images / files.disk.name, files.disk)
        for path in (files.kernel, files.initrd):
            path.hardlink_to(self._images / path.name)
        files.memory.hardlink_to(self._layout.snapshot(head).memory)
        record_files.write_record(directory, sandbox, durable=False)

    def read_all(self) -> object:
        """Read and parse all manifests."""
        manifests = [*self._layout.snapshots.glob("*/manifest.json"), *self._layout.sandboxes.glob("*/manifest.json")]
        return [json.loads(manifest.read_bytes()) for manifest in manifests]


def _collect_samples(gateway: Gateway, records: Records, *, starts: int, rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(starts):
        _, elapsed = time_call(records.store.read_all)
        samples["floor_start"].append(elapsed)
        with _running_gateway(gateway) as pid:
            samples["start"].append(_read_startup_ms(gateway))
            samples["memory"].append(_read_resident_bytes(pid))
            if number == starts - 1:
                _measure_requests(gateway, records, rounds, samples)
                time.sleep(1)
                samples["idle"].append(_measure_idle_cpu_ms(pid))
                samples["memory_used"].append(_read_resident_bytes(pid))
    return samples


@contextlib.contextmanager
def _running_gateway(gateway: Gateway) -> Iterator[int]:
    gateway.start()
    try:
        assert gateway.process
        yield gateway.process.pid
    finally:
        if (code := gateway.stop()) != 0:
            raise RuntimeError(f"the gateway exited with code {code}:\n{gateway.log_tail()}")


def _read_startup_ms(gateway: Gateway) -> float:
    """Return how many milliseconds the gateway took to open and scan its host and build its index, from its log."""
    lines = [line for line in gateway.log_file.read_text().splitlines() if line.startswith("{")]
    *_, last_entry = (entry for entry in map(json.loads, lines) if entry["event"] == "open")
    return float(last_entry["ms"])


def _measure_requests(gateway: Gateway, records: Records, rounds: int, samples: dict[str, list[float]]) -> None:
    newest_name = gateway.call("GET", f"/snapshots/{records.snapshot_ids[-1]}")["names"][0]
    # The page in the measurement does not start at the beginning of the list.
    first_page = gateway.client.get("/snapshots", params={"limit": min(len(records.snapshot_ids) // 2, 1000)})
    token = first_page.headers["x-next-token"]
    targets: dict[str, tuple[str, dict[str, Any]]] = {
        "floor_request": ("/volumes", {}),
        "page": ("/snapshots", {"limit": _PAGE_SIZE, "nextToken": token}),
        "show": (f"/snapshots/{newest_name}", {}),
        "find": ("/snapshots", {"name": newest_name}),
        "sandboxes": ("/sandboxes", {"limit": _PAGE_SIZE}),
        "lineage": ("/lineage", {"flat": True}),
        "metrics": ("/metrics", {}),
    }
    for _ in range(rounds):
        for key, (path, params) in targets.items():
            response, elapsed = time_call(_make_request(gateway, "GET", path, params))
            assert response.is_success, response.text
            samples[key].append(elapsed)
        # Each deletion gives the next snapshot of the chain a new parent.
        if unused_id := records.pop_unused_id():
            response, elapsed = time_call(_make_request(gateway, "DELETE", f"/snapshots/{unused_id}", {}))
            assert response.status_code == 204, response.text
            samples["delete"].append(elapsed)


def _make_request(gateway: Gateway, method: str, path: str, params: dict[str, Any]) -> Callable[[], Any]:
    return lambda: gateway.client.request(method, path, params=params)


def _read_resident_bytes(pid: int) -> float:
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def _measure_idle_cpu_ms(pid: int) -> float:
    """Return the CPU time in milliseconds that a process uses per second while it is idle."""
    start_cpu_ms, start_time = read_cpu_ms(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (read_cpu_ms(pid) - start_cpu_ms) / (time.monotonic() - start_time)


def _add_measures(
    result: Result,
    size: int,
    samples: dict[str, list[float]],
    *,
    floor_title: str,
    start_limit_ms: float | None,
    is_largest: bool,
) -> None:
    """Add the measurements for one size. Only the largest size has targets."""

    def make_p50_target(value: float | None) -> Target | None:
        return Target("p50", value) if is_largest and value is not None else None

    title = f"{size} snapshots: "
    result.add_measure(f"floor_start_{size}", title + floor_title, samples=samples["floor_start"])
    result.add_measure(
        f"start_{size}",
        title + "open the host and build the index",
        samples=samples["start"],
        floor=f"floor_start_{size}",
        target=make_p50_target(start_limit_ms),
    )
    result.add_measure(f"floor_request_{size}", title + "an empty list", samples=samples["floor_request"])
    for key, text in _REQUESTS.items():
        result.add_measure(
            f"{key}_{size}",
            title + text,
            samples=samples[key],
            floor=f"floor_request_{size}",
            target=make_p50_target(_PAGE_LIMIT_MS) if key == "page" else None,
        )
    result.add_measure(f"delete_{size}", title + "delete one in the chain", samples=samples["delete"])
    result.add_measure(f"idle_{size}", title + "idle CPU time per second", samples=samples["idle"])
    result.add_measure(
        f"memory_{size}",
        title + "resident after the start",
        "bytes",
        samples=samples["memory"],
        target=make_p50_target(_MEMORY_LIMIT_BYTES),
    )
    result.add_measure(
        f"memory_used_{size}", title + "resident after the requests", "bytes", samples=samples["memory_used"]
    )
