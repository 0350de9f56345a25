"""Save changes to records: the host commits a changed copy, then the index is updated.

Changes are applied to individual fields of the current record, so that concurrent changes do not overwrite each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from sandbox_gateway.engine.context import Context
from sandbox_gateway.records import TAG_SEPARATOR, AnyRecord, Sandbox, Snapshot, SnapshotKind, now
from sandbox_gateway.tasks import finish_despite_cancellation

Fields = Mapping[str, Any]


async def save_sandbox(
    context: Context, id: str, *, required_values: Fields | None = None, counts_as_change: bool = True, **changes: Any
) -> Sandbox:
    """Commit ``changes`` to a sandbox's record and return the new record. On failure, the index keeps the old record.

    ``required_values``: field values that the current record must have; otherwise, the record is returned unchanged.
    ``counts_as_change``: whether the record's generation increases.
    """
    return await finish_despite_cancellation(
        _save_sandbox(context, id, required_values or {}, changes, counts_as_change)
    )


async def save_snapshot(
    context: Context, id: str, *, required_values: Fields | None = None, counts_as_change: bool = True, **changes: Any
) -> Snapshot:
    """Commit ``changes`` to a snapshot's record, like ``save_sandbox``."""
    return await finish_despite_cancellation(
        _save_snapshot(context, id, required_values or {}, changes, counts_as_change)
    )


async def save_names(context: Context, snapshot: Snapshot, names: Sequence[str]) -> Snapshot:
    """Replace all names of a snapshot or template, with and without tags.

    The caller holds ``Snapshots.naming_lock`` and has reserved the new names.
    """
    time = now()
    is_template = snapshot.kind is SnapshotKind.TEMPLATE
    return await save_snapshot(
        context,
        snapshot.id,
        names=[name for name in names if TAG_SEPARATOR not in name],
        tagged_names=[name for name in names if TAG_SEPARATOR in name],
        named_at={name: snapshot.named_at.get(name, time) for name in names} if is_template else {},
        updated_at=time,
    )


def copy_with_changes(record: AnyRecord, *, counts_as_change: bool = True, **changes: Any) -> AnyRecord:
    """Return a copy of a record with ``changes``, as its next generation if ``counts_as_change``."""
    return record.model_copy(update={**changes, "generation": record.generation + counts_as_change}, deep=True)


def record_locked(context: Context, record: Sandbox | Snapshot) -> AbstractAsyncContextManager[None]:
    """Return a lock that prevents other tasks from saving or removing a record.

    The record may have changed before the lock was acquired, so look it up again inside the context.
    """
    noun = "sandbox" if isinstance(record, Sandbox) else "snapshot"
    return context.locks.held(f"record {record.id}", f"{noun} {record.id}")


async def _save_sandbox(
    context: Context, id: str, required_values: Fields, changes: Fields, counts_as_change: bool
) -> Sandbox:
    async with record_locked(context, context.index.get_sandbox(id)):
        current_record = context.index.get_sandbox(id)
        if not _has_values(current_record, required_values):
            return current_record
        new_record = copy_with_changes(current_record, counts_as_change=counts_as_change, **changes)
        await context.host.save(new_record)
        context.index.put(new_record)
        return new_record


async def _save_snapshot(
    context: Context, id: str, required_values: Fields, changes: Fields, counts_as_change: bool
) -> Snapshot:
    async with record_locked(context, context.index.get_any_snapshot(id)):
        current_record = context.index.get_any_snapshot(id)
        if not _has_values(current_record, required_values):
            return current_record
        new_record = copy_with_changes(current_record, counts_as_change=counts_as_change, **changes)
        await context.host.save_snapshot(new_record)
        if id in context.index.snapshots:  # it may have been removed during the save
            context.index.put(new_record)
        return new_record


def _has_values(record: Sandbox | Snapshot, values: Fields) -> bool:
    return all(getattr(record, name) == value for name, value in values.items())
