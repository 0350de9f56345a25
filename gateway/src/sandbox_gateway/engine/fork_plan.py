"""Plan forks: choose their names, create their records, and decide whether they restore the snapshot's memory."""

from __future__ import annotations

from sandbox_gateway.config import Config
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.spec import ForkSpec, Unset
from sandbox_gateway.engine.timeouts import compute_end_time
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.records import MemoryMode, Resources, Sandbox, SandboxState, Snapshot, SnapshotKind, new_id, now

_MAX_COUNT = 1000


def list_requested_names(spec: ForkSpec) -> list[str]:
    """Return one name for each fork: the requested names, or empty strings if none are requested. Raises Invalid."""
    if spec.names is not None:
        if spec.count not in (1, len(spec.names)):
            raise Invalid(
                f"count is {spec.count}, but there are {len(spec.names)} names: remove count, or list "
                f"{spec.count} names"
            )
        return [require_valid_name(name) for name in spec.names]
    if not 1 <= spec.count <= _MAX_COUNT:
        raise Invalid(f"a count of {spec.count} is out of range: request 1 to {_MAX_COUNT} sandboxes")
    return [""] * spec.count


def create_sandbox_record(snapshot: Snapshot, spec: ForkSpec, name: str, config: Config) -> Sandbox:
    """Create the record of a sandbox that is about to be forked from ``snapshot``."""
    snapshot_resources = snapshot.resources
    id = new_id()
    created_at = now()
    is_public = config.network.public_ports if spec.public_ports is None else spec.public_ports
    return Sandbox(
        id=id,
        name=name or id,
        state=SandboxState.PAUSED if spec.paused else SandboxState.RUNNING,
        pause_snapshot=snapshot.id if spec.paused else "",
        cold_start=spec.paused and spec.cold_start,
        template_id=snapshot.id if snapshot.kind is SnapshotKind.TEMPLATE else snapshot.template_id,
        forked_from=snapshot.id,
        head=snapshot.id,
        base=snapshot.id,
        parent_sandbox=snapshot.source_sandbox,
        resources=Resources(
            cpus=spec.cpus or snapshot_resources.cpus,
            memory_mb=spec.memory_mb or snapshot_resources.memory_mb,
            disk_mb=spec.disk_mb or snapshot_resources.disk_mb,
        ),
        network=spec.network.model_copy(update={"allow_public_traffic": is_public}),
        metadata=spec.metadata,
        env=spec.env,
        created_at=created_at,
        started_at=created_at,
        end_at=compute_end_time(spec.timeout, config),
        timeout=None if isinstance(spec.timeout, Unset) else spec.timeout or None,
        on_timeout=spec.on_timeout,
        auto_resume=spec.auto_resume,
        idempotency_key=spec.idempotency_key,
    )


def should_restore_memory(snapshot: Snapshot, spec: ForkSpec, resources: Resources, *, can_resize: bool) -> bool:
    """Return whether forks resume from the snapshot's memory.

    Raises Invalid if the disk in ``resources`` is too small, and Unsupported if the memory cannot be resumed with
    ``resources``. ``can_resize``: the host can change the resources of a machine that resumes from memory.
    """
    snapshot_resources = snapshot.resources
    if resources.disk_mb < snapshot_resources.disk_mb:
        raise Invalid(
            f"the disk of {resources.disk_mb} MiB is smaller than the snapshot's "
            f"{snapshot_resources.disk_mb} MiB: request at least {snapshot_resources.disk_mb} MiB"
        )
    if snapshot.memory is MemoryMode.NONE or spec.cold_start:
        return False
    if resources != snapshot_resources and not can_resize:
        raise Unsupported(
            f"snapshot {snapshot.id} holds the memory of a machine with {snapshot_resources.cpus} CPUs, "
            f"{snapshot_resources.memory_mb} MiB of memory and a disk of {snapshot_resources.disk_mb} MiB: fork it "
            "with the same resources, or boot from its disk with 'coldStart: true'"
        )
    return True
