"""Plan forks: choose their names, create their records, and decide whether they restore the snapshot's memory."""

from __future__ import annotations

from sandbox_gateway.config import Config
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.spec import ForkSpec, Unset
from sandbox_gateway.engine.timeouts import end_time
from sandbox_gateway.errors import Invalid, Unsupported
from sandbox_gateway.records import Memory, Resources, Sandbox, SandboxState, Snapshot, SnapshotKind, new_id, now

_MAX_COUNT = 1000


def requested_names(spec: ForkSpec) -> list[str]:
    """Return the requested name of each fork, or an empty string for each if none is requested. Raises Invalid."""
    if spec.names is not None:
        if spec.count not in (1, len(spec.names)):
            raise Invalid(
                f"count is {spec.count}, but there are {len(spec.names)} names: remove count, or list that number of "
                "names"
            )
        return [require_valid_name(name) for name in spec.names]
    if not 1 <= spec.count <= _MAX_COUNT:
        raise Invalid(f"a count of {spec.count} is not possible: request 1 to {_MAX_COUNT} sandboxes")
    return [""] * spec.count


def new_sandbox_record(snapshot: Snapshot, spec: ForkSpec, name: str, config: Config) -> Sandbox:
    """Create the record of a sandbox that is about to be forked from ``snapshot``."""
    source = snapshot.resources
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
            cpus=spec.cpus or source.cpus,
            memory_mb=spec.memory_mb or source.memory_mb,
            disk_mb=spec.disk_mb or source.disk_mb,
        ),
        network=spec.network.model_copy(update={"allow_public_traffic": is_public}),
        metadata=spec.metadata,
        env=spec.env,
        created_at=created_at,
        started_at=created_at,
        end_at=end_time(spec.timeout, config),
        timeout=None if isinstance(spec.timeout, Unset) else spec.timeout or None,
        on_timeout=spec.on_timeout,
        auto_resume=spec.auto_resume,
        idempotency_key=spec.idempotency_key,
    )


def should_restore_memory(snapshot: Snapshot, spec: ForkSpec, resources: Resources, *, can_resize: bool) -> bool:
    """Return whether forks resume from the snapshot's memory.

    Raises Invalid or Unsupported if that is not possible with ``resources``. ``can_resize``: the host can change the
    resources of a machine that resumes from memory.
    """
    source = snapshot.resources
    if resources.disk_mb < source.disk_mb:
        raise Invalid(
            f"the disk of {resources.disk_mb} MiB is smaller than the snapshot's {source.disk_mb} MiB: request at "
            f"least {source.disk_mb} MiB"
        )
    if snapshot.memory is Memory.NONE or spec.cold_start:
        return False
    if resources != source and not can_resize:
        raise Unsupported(
            f"snapshot {snapshot.id} holds the memory of a machine with {source.cpus} cpus, {source.memory_mb} MiB of "
            f"memory and a disk of {source.disk_mb} MiB: fork it with the same sizes, or boot from its disk "
            "with a cold start (coldStart)"
        )
    return True
