"""Measure a clone, a snapshot and a rollback of the jail host's storage while it has up to 1,000 of each."""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.benches.jail import describe_zfs, measure_raw_rollback, run_command
from benchmarks.context import Context
from benchmarks.measure import Result, Target
from benchmarks.timers import time_call
from sandbox_gateway.hosts.jail_zfs.storage.storage import ZfsStorage
from sandbox_gateway.records import MemoryMode, Sandbox, SandboxState, Snapshot, new_id
from tests.support import pools, session

_SIZES = (1, 100, 300, 1_000)
_QUICK_SIZES = (1, 20)
_POOL_MB = 2048
_FILE_BYTES = 1 << 20
_NOTE = (
    "no jails run. Only the measured file systems are mounted, because zfs-fuse needs a long time for each mount. The "
    "clones descend from one template, and the snapshots from one sandbox"
)


class JailGrowth:
    name = "jail_growth"
    title = "clones and snapshots of a jail host that already has up to 1,000"

    def run(self, ctx: Context) -> Result:
        sizes = _QUICK_SIZES if ctx.quick else _SIZES
        rounds = ctx.choose(full=12, quick=2)
        result = Result(self.name, self.title, {"sizes": list(sizes), "rounds": rounds}, notes=[_NOTE])
        try:
            with _temporary_storage() as storage:
                # The pool has started zfs-fuse.
                result.settings["zfs"] = describe_zfs()
                store = _Store(storage)
                for size in sizes:
                    _measure(ctx, store, size, rounds, result, is_last=size == sizes[-1])
        except Exception:
            # With many clones, zfs-fuse may report a dataset as busy for ever. The smaller sizes are still useful.
            if not result.measures:
                raise
            result.failure = traceback.format_exc()
        return result


@contextlib.contextmanager
def _temporary_storage() -> Iterator[ZfsStorage]:
    directory = session.get_run_dir()
    with pools.pool(f"t{session.get_run_id()}g", directory, megabytes=_POOL_MB) as pool:
        dataset = f"{pool.name}/growth"
        pools.run("zfs", "create", dataset)
        storage = ZfsStorage(dataset, state_root=directory / "jail-growth")
        storage.open()
        try:
            storage.scan()
            yield storage
        finally:
            storage.close()


class _Store:
    """The storage, filled with clones of one template and snapshots of one sandbox."""

    def __init__(self, storage: ZfsStorage) -> None:
        self.storage = storage
        self.template = Snapshot(memory=MemoryMode.NONE)
        self.source = Sandbox(name="source", state=SandboxState.PAUSED, template_id=self.template.id)
        self.size = 0

        def fill(root: Path) -> None:
            (root / "file").write_bytes(b"x" * _FILE_BYTES)

        storage.snapshots.create_base(self.template, fill)
        storage.instances.clone(self.template.id, self.source.instance)
        storage.instances.save(self.source)

    def grow(self, size: int) -> None:
        """Add unmounted clones with records, and snapshots, until there are ``size`` of each."""
        for _ in range(self.size, size):
            sandbox = self.make_sandbox()
            self.storage.instances.clone(self.template.id, sandbox.instance, props={"canmount": "noauto"})
            self.storage.instances.save(sandbox)
            self.storage.snapshots.capture(self.source.instance, self.make_snapshot())
            self.size += 1

    def make_sandbox(self) -> Sandbox:
        return Sandbox(name=new_id(), state=SandboxState.PAUSED, template_id=self.template.id, head=self.template.id)

    def make_snapshot(self) -> Snapshot:
        return Snapshot(memory=MemoryMode.NONE, source_sandbox=self.source.id, parent=self.template.id)


def _measure(ctx: Context, store: _Store, size: int, rounds: int, result: Result, *, is_last: bool) -> None:
    """Measure raw commands and the storage alternately. Removes each clone and snapshot afterwards."""
    ctx.print_progress(f"creating {size} clones and snapshots ({describe_zfs()})")
    store.grow(size)
    storage, instances = store.storage, store.storage.instances
    source, origin = instances.dataset(store.source.instance), storage.snapshots.get_full_name(store.template.id)
    samples: dict[str, list[float]] = defaultdict(list)
    with ctx.showing_progress(f"{size} clones and snapshots", rounds) as steps:
        for number in range(rounds):
            raw_clone, raw_snapshot = instances.dataset(f"raw{number}"), f"{source}@raw{number}"
            _, elapsed = time_call(partial(run_command, ("zfs", "clone", origin, raw_clone)))
            samples["floor_clone"].append(elapsed)
            pools.destroy_all(raw_clone)
            _measure_clone(store, store.template, samples, "clone")
            _, elapsed = time_call(partial(run_command, ("zfs", "snapshot", raw_snapshot)))
            samples["floor_snapshot"].append(elapsed)
            pools.run("zfs", "destroy", raw_snapshot)
            snapshot = store.make_snapshot()
            _, elapsed = time_call(partial(storage.snapshots.capture, store.source.instance, snapshot))
            samples["snapshot"].append(elapsed)
            full_name = storage.snapshots.get_full_name(snapshot.id)
            elapsed = measure_raw_rollback(full_name, instances.dataset(f"rollback{number}"))
            samples["floor_rollback"].append(elapsed)
            raw_clone = instances.dataset(f"rawrollback{number}")
            _, elapsed = time_call(partial(run_command, ("zfs", "clone", full_name, raw_clone)))
            samples["floor_rollback_clone"].append(elapsed)
            pools.destroy_all(raw_clone)
            # In the storage, a rollback is a clone of a snapshot, and then the removal of the old clone.
            _measure_clone(store, snapshot, samples, "rollback")
            storage.snapshots.destroy(snapshot.id)
            steps.advance()
    target = Target("ratio", 1.3) if is_last else None
    for key, title, floor in (
        ("floor_clone", "floor: zfs clone, no gateway", ""),
        ("clone", "storage.instances.clone", "floor_clone"),
        ("floor_snapshot", "floor: zfs snapshot, no gateway", ""),
        ("snapshot", "storage.snapshots.capture", "floor_snapshot"),
        ("floor_rollback_clone", "floor: zfs clone of a sandbox's snapshot, no gateway", ""),
        ("rollback", "storage.instances.clone of a sandbox's snapshot, for a rollback", "floor_rollback_clone"),
        ("floor_rollback", "zfs rollback in place, which the storage does not use, no gateway", ""),
        ("discard", "storage.instances.discard", ""),
    ):
        result.add_measure(
            f"{key}_{size}",
            f"{title}, with {size}",
            samples=samples[key],
            floor=f"{floor}_{size}" if floor else "",
            target=target if floor else None,
        )


def _measure_clone(store: _Store, snapshot: Snapshot, samples: dict[str, list[float]], key: str) -> None:
    """Measure a clone of a snapshot, and its removal."""
    instances, instance = store.storage.instances, store.make_sandbox().instance
    _, elapsed = time_call(lambda: instances.clone(snapshot.id, instance))
    samples[key].append(elapsed)
    _, elapsed = time_call(lambda: instances.discard(instance))
    samples["discard"].append(elapsed)
