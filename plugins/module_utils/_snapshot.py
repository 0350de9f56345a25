# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_snapshot``: capture sandboxes, transfer and remove snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._age import parse_identity, parse_recipients
from ansible_collections.grove.sandbox.plugins.module_utils._artifacts import (
    Artifact,
    find_artifact,
    pull,
    push,
    replace_tag,
)
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, removal_explained
from ansible_collections.grove.sandbox.plugins.module_utils._fields import RETENTION_FIELDS
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import list_volume_paths
from ansible_collections.grove.sandbox.plugins.module_utils._names import find_taken_names
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    SNAPSHOT,
    Action,
    Change,
    Plan,
    Planner,
    failures_conditional,
    make_diverged_condition,
    may_have_diverged,
    require_minimum,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    SNAPSHOT_KEYS,
    make_sandbox_shape,
    make_snapshot_shape,
)
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot_files import (
    PRIVATE_MODE,
    SnapshotFile,
    add_import_plan,
    export_to_file,
    find_origin_conflict,
    import_from_file,
    observe_exported_file,
    observe_imported_file,
    protect_file,
    require_complete_file,
    require_writable_file,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

    Users = Mapping[str, tuple[str, ...]]
    """Names by kind of resource: "sandbox" or "volume"."""

SINGULAR, PLURAL = "snapshot", "snapshots"
RESULT_KEYS = {PLURAL: SNAPSHOT_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "sandbox": {"type": "list", "elements": "str", "aliases": ["sandboxes"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "description": {"type": "str"},
    "memory": {"type": "str", "choices": ["auto", "none"], "default": "auto"},
    "volumes": {"type": "list", "elements": "str"},
    "expires_in": {"type": "int"},
    "retention": {
        "type": "dict",
        "options": {"keep_last": {"type": "int"}, "keep_daily": {"type": "int"}, "max_age": {"type": "int"}},
        "required_one_of": [("keep_last", "keep_daily", "max_age")],
    },
    "prewarm": {"type": "int"},
    "export_to": {"type": "path"},
    "export_since": {"type": "str"},
    "age_recipients": {"type": "list", "elements": "str"},
    "import_from": {"type": "path"},
    "age_identity": {"type": "path"},
    "push_to": {"type": "str"},
    "pull_from": {"type": "str"},
    "trust": {"type": "list", "elements": "str"},
    "when_changed": {"type": "bool", "default": False},
    "when_unused": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
_TRANSFER_OPTIONS = ("export_to", "import_from", "push_to", "pull_from")
RULES: dict[str, Any] = {
    "required_by": {
        "export_since": ("export_to",),
        "age_recipients": ("export_to",),
        "age_identity": ("import_from",),
    },
    "required_if": [("state", "present", ("sandbox", "export_to", "import_from", "push_to", "pull_from"), True)],
    "mutually_exclusive": [
        ("import_from", "pull_from"),
        *(
            (source, option)
            for source in ("import_from", "pull_from")
            for option in (
                *("sandbox", "export_to", "push_to", "description", "volumes", "expires_in", "retention", "prewarm"),
            )
        ),
    ],
}


@dataclass(frozen=True)
class DesiredState:
    """The user's options. ``sandboxes`` maps each snapshot name to its sandbox; it is empty if no sandbox is given."""

    names: tuple[str, ...]
    state: str
    sandboxes: Mapping[str, str] = field(default_factory=dict)
    description: str | None = None
    memory: str = "auto"
    volumes: tuple[str, ...] | None = None
    expires_in: int | None = None
    retention: Mapping[str, int] | None = None
    prewarm: int | None = None
    when_changed: bool = False
    when_unused: bool = False
    export_to: str = ""
    export_since: str = ""
    age_recipients: tuple[str, ...] = ()
    import_from: str = ""
    age_identity: str = ""
    push_to: str = ""
    pull_from: str = ""
    trust: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurrentState:
    """The state of the gateway that a plan needs.

    ``resources`` maps the requested names to snapshots. ``sandboxes`` is keyed by ref, ``heads`` and ``users`` by
    snapshot id. ``base``: the snapshot or template ``export_since``, if it exists. ``file``: the file of an export or
    import, if it exists. ``artifact``: likewise for a push or pull.
    """

    resources: Mapping[str, Mapping[str, Any]]
    sandboxes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    taken_names: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, Users] = field(default_factory=dict)
    base: Mapping[str, Any] | None = None
    file: SnapshotFile | None = None
    artifact: Artifact | None = None
    transfer_failure: Failure | None = None
    """Why the file or the registry cannot be used, or why the gateway cannot transfer snapshots."""
    is_session: bool = False
    """Whether this is the state of a plan session."""


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    names = validate_names(params["name"], "snapshot")
    sandbox_refs = params.get("sandbox") or []
    has_transfer = any(params.get(option) for option in _TRANSFER_OPTIONS)
    _check_transfer_options(params, names, has_transfer=has_transfer)
    needs_sandbox = params["state"] == "present" and not has_transfer
    if (needs_sandbox or sandbox_refs) and len(sandbox_refs) not in (1, len(names)):
        raise Failure(
            f"there are {len(names)} names, but {len(sandbox_refs)} sandboxes: list one sandbox, or one for each name"
        )
    if len(sandbox_refs) == 1:
        sandbox_refs = sandbox_refs * len(names)
    repeated_refs = [ref for ref, count in Counter(sandbox_refs).items() if count > 1]
    if params.get("when_changed") and repeated_refs:
        raise Failure(
            f"when_changed allows only one snapshot for each sandbox, but several names are set for "
            f"{', '.join(map(repr, repeated_refs))}: set one name for each sandbox, or omit when_changed"
        )
    return DesiredState(
        names=names,
        state=params["state"],
        sandboxes=dict(zip(names, sandbox_refs)),
        description=params.get("description"),
        memory=params.get("memory") or "auto",
        volumes=_parse_requested_volumes(params.get("volumes")),
        expires_in=require_minimum(params.get("expires_in"), 1, "expires_in (seconds)"),
        retention=_build_retention_fields(params.get("retention")),
        prewarm=require_minimum(params.get("prewarm"), 0, "prewarm"),
        when_changed=bool(params.get("when_changed")),
        when_unused=bool(params.get("when_unused")),
        export_to=params.get("export_to") or "",
        export_since=params.get("export_since") or "",
        age_recipients=parse_recipients(params.get("age_recipients")),
        import_from=params.get("import_from") or "",
        age_identity=parse_identity(params.get("age_identity")),
        push_to=params.get("push_to") or "",
        pull_from=params.get("pull_from") or "",
        trust=tuple(params.get("trust") or ()),
    )


def _check_transfer_options(params: Mapping[str, Any], names: tuple[str, ...], *, has_transfer: bool) -> None:
    source = "pull_from" if params.get("pull_from") else "import_from"
    if params.get("trust") and not params.get(source):
        raise Failure("trust is valid only with import_from or pull_from: remove it")
    if not has_transfer:
        return
    options = " and ".join(option for option in _TRANSFER_OPTIONS if params.get(option))
    if params["state"] == "absent":
        raise Failure(f"{options} cannot be combined with state: absent: remove one of them")
    if len(names) != 1:
        container = "an artifact" if params.get("push_to") or params.get("pull_from") else "a file"
        raise Failure(f"{container} contains one snapshot, but there are {len(names)} names: use one task for each")
    if params.get("when_changed"):
        raise Failure(f"when_changed cannot be combined with {options}: use a task for each")
    if params.get(source) and params.get("memory") == "none":
        raise Failure(f"memory: none is not valid with {source}: export or push the snapshot without memory instead")


def _build_retention_fields(option: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Return the retention rule as the gateway's request fields."""
    if option is None:
        return None
    return {
        RETENTION_FIELDS[key]: require_minimum(value, 1, f"retention.{key}")
        for key, value in option.items()
        if value is not None
    }


def _parse_requested_volumes(option: list[str] | None) -> tuple[str, ...] | None:
    return validate_names(option, "volume") if option else None if option is None else ()


def observe(client: Client, want: DesiredState) -> CurrentState:
    resources = find_snapshots(client, want.names)
    if want.state == "absent":
        return CurrentState(resources, users={} if want.when_unused else find_users(client, resources.values()))
    missing_names = [name for name in want.names if name not in resources]
    file, artifact, transfer_failure = None, None, None
    if want.export_to:
        file, transfer_failure = observe_exported_file(client, want.export_to, want.age_recipients, has_volume=False)
    elif want.import_from:
        file, transfer_failure = observe_imported_file(client, want.import_from, want.age_identity, has_volume=False)
    base = client.find(f"/snapshots/{quote_segment(want.export_since)}") if want.export_since else None
    reference = want.push_to or want.pull_from
    if reference and transfer_failure is None:
        try:
            artifact = find_artifact(client, reference)
        except Failure as failure:
            transfer_failure = failure
    taken_names = find_taken_names(client, missing_names, excluded_kind="snapshot")
    refs = dict.fromkeys(want.sandboxes.values())
    refs_to_capture = {want.sandboxes[name] for name in missing_names if name in want.sandboxes}
    sandboxes = {}
    for ref in refs:
        path = f"/sandboxes/{quote_segment(ref)}"
        # A snapshot can outlive its sandbox, so only sandboxes with missing snapshots have to exist.
        detail = client.get(path) if ref in refs_to_capture else client.find(path)
        if detail is not None:
            sandboxes[ref] = make_sandbox_shape(detail)
    heads = {}
    if want.when_changed:
        for ref in refs_to_capture:
            head = client.find(f"/snapshots/{quote_segment(sandboxes[ref]['snapshot_id'] or '-')}")
            if head is not None and head.get("kind", "snapshot") == "snapshot":
                heads[head["snapshotID"]] = make_snapshot_shape(head)
    return CurrentState(
        resources,
        sandboxes,
        heads,
        taken_names,
        base=make_snapshot_shape(base) if base else None,
        file=file,
        artifact=artifact,
        transfer_failure=transfer_failure,
        is_session=client.is_planning,
    )


def find_snapshots(client: Client, refs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the shapes of the snapshots among ``refs`` (names or ids), by ref."""
    shapes = {}
    for ref in refs:
        snapshot = client.find(f"/snapshots/{quote_segment(ref)}")
        # The gateway also returns templates here.
        if snapshot is not None and snapshot.get("kind", "snapshot") == "snapshot":
            shapes[ref] = make_snapshot_shape(snapshot)
    return shapes


def find_users(client: Client, snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Users]:
    """Return the names of the resources that prevent the removal of ``snapshots``, by snapshot id and kind.

    ``snapshots`` can also be templates. The gateway determines the users, because they depend on its host: they can
    also be cloned volumes, and sandboxes that were rolled back to the snapshot.
    """
    users_by_id = {}
    for shape in snapshots:
        detail = client.find(f"/snapshots/{quote_segment(shape['id'])}") or {}
        users: dict[str, tuple[str, ...]] = {}
        for each in detail.get("users") or ():
            users[each["kind"]] = (*users.get(each["kind"], ()), each["name"])
        if users:
            users_by_id[shape["id"]] = users
    return users_by_id


def make_view(shape: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: shape[key] for key in ("name", "description", "source_sandbox_id", "status", "volumes")}
    fields.update({key: shape[key] for key in ("prewarm", "imported_from") if shape[key]})
    return fields


def list_named_paths(want: DesiredState, have: CurrentState) -> list[str]:
    return list_volume_paths(want.volumes or ())


def plan(want: DesiredState, have: CurrentState) -> Plan:
    planner = Planner()
    for name in want.names:
        plan_one = partial(_plan_snapshot, want, have, name)
        if want.import_from and name in have.resources:
            imported_from = have.resources[name]["imported_from"]
            add_import_plan(planner, name, plan_one, have.file, want.import_from, imported_from)
        else:
            planner.add(name, plan_one)
    return planner.plan()


def _plan_snapshot(want: DesiredState, have: CurrentState, name: str) -> list[Action]:
    current_shape = have.resources.get(name)
    if want.state == "absent":
        return [] if current_shape is None else [_plan_removal(want, have, name, current_shape)]
    if current_shape is not None:
        _check_differences(want, have, name, current_shape)
        prewarm_actions = plan_prewarm(name, current_shape, make_view(current_shape), want.prewarm, SNAPSHOT)
        current_view = make_view(current_shape)
        return [
            *prewarm_actions,
            *_plan_export(want, have, name, current_view, current_shape),
            *_plan_push(want, have, name, current_view, current_shape),
        ]
    if name in have.taken_names:
        raise _refusals.create_name_taken_error(name, have.taken_names[name])
    if want.import_from:
        return [_plan_import(want, have, name)]
    if want.pull_from:
        return [_plan_pull(want, have, name)]
    if not want.sandboxes:
        raise Failure(
            f"snapshot {name!r} not found: set 'sandbox' to the sandbox to capture, or name an existing snapshot",
            "not_found",
        )
    sandbox = have.sandboxes[want.sandboxes[name]]
    condition, is_expected = "", True
    if want.when_changed:
        is_expected = find_unchanged_snapshot(want, have, sandbox) is None
        if not is_expected and not (have.is_session and may_have_diverged(sandbox)):
            return []
        if find_unchanged_snapshot(want, have, {**sandbox, "diverged": False}) is not None:
            condition = make_diverged_condition(sandbox)
    with failures_conditional(condition, is_expected=is_expected):
        check_running_for_capture(want.sandboxes[name], sandbox)
        capture = _plan_capture(want, name, sandbox, condition, is_expected=is_expected)
        new_view = capture.changes[0].after or {}
        return [capture, *_plan_export(want, have, name, new_view), *_plan_push(want, have, name, new_view)]


def _require_transferable(have: CurrentState) -> None:
    """Raise the Failure because of which the task cannot use the file or artifact, if there is one.

    Call this after all checks that do not depend on the file, which an earlier task of the run may write.
    """
    if have.transfer_failure is not None:
        raise have.transfer_failure


def _require_no_volumes(name: str, current_view: Mapping[str, Any], container: str, remedy: str) -> None:
    """Raise Failure if a snapshot includes volumes, which neither a file nor an artifact can contain."""
    if current_view["volumes"]:
        raise Failure(
            f"snapshot {name!r} includes volumes, which {container} cannot contain: take a snapshot without volumes, "
            f"and {remedy}",
            "unsupported",
        )


def _plan_export(
    want: DesiredState,
    have: CurrentState,
    name: str,
    current_view: Mapping[str, Any],
    current_shape: Mapping[str, Any] | None = None,
) -> list[Action]:
    """Plan to export a snapshot, unless the file already contains it. ``current_shape`` is None for a new snapshot."""
    if not want.export_to:
        return []
    _require_no_volumes(name, current_view, "a file", "export that one")
    _require_transferable(have)
    if current_shape is not None and have.file is not None and _is_exported(want, have, current_shape, have.file):
        return _plan_private_file(want, have.file, name, current_view)
    if want.export_since:
        _require_base(want, have)
    after = {**current_view, "exported_to": want.export_to}
    if want.export_since:
        after["exported_since"] = want.export_since
    if want.age_recipients:
        after["encrypted_for"] = list(want.age_recipients)
    overwritten_id = have.file.snapshot_id if have.file is not None else ""
    request = {"name": name, "file": want.export_to, "overwrites": overwritten_id}
    if want.export_since:
        request["since"] = want.export_since
    if want.age_recipients:
        request["recipients"] = list(want.age_recipients)
    return [Action("export", (Change(name, current_view, after, SNAPSHOT),), request)]


def _require_base(want: DesiredState, have: CurrentState) -> None:
    """Raise Failure if ``export_since`` does not exist. Only the gateway knows which bases fit."""
    if have.base is None:
        raise Failure(
            f"snapshot {want.export_since!r} not found: set export_since to an earlier snapshot or a template of this "
            "gateway, or omit it",
            "not_found",
        )


def _plan_push(
    want: DesiredState,
    have: CurrentState,
    name: str,
    current_view: Mapping[str, Any],
    current_shape: Mapping[str, Any] | None = None,
) -> list[Action]:
    """Plan to push a snapshot, unless the tag already names it. ``current_shape`` is None for a new snapshot."""
    if not want.push_to:
        return []
    _require_no_volumes(name, current_view, "an artifact", "push that")
    _require_transferable(have)
    artifact = have.artifact
    if artifact is not None and current_shape is not None and _is_pushed(current_shape, artifact):
        return []
    after = {**current_view, "pushed_to": want.push_to}
    replaced_digest = artifact.digest if artifact is not None else ""
    request = {"name": name, "reference": want.push_to, "replaces": replaced_digest}
    return [Action("push", (Change(name, current_view, after, SNAPSHOT),), request)]


def _is_pushed(snapshot: Mapping[str, Any], artifact: Artifact) -> bool:
    """Return whether the artifact contains what a push would write. `sandboxctl` can push without the memory."""
    has_memory = snapshot["memory"] != "none"
    return artifact.is_own and artifact.snapshot_id == snapshot["id"] and artifact.has_memory == has_memory


def _plan_pull(want: DesiredState, have: CurrentState, name: str) -> Action:
    _require_transferable(have)
    artifact = have.artifact
    if artifact is None:
        # Plan sessions push nothing.
        with failures_conditional(f"only if no earlier task of the run pushes {want.pull_from}"):
            raise Failure(f"the artifact {want.pull_from} does not exist: correct pull_from, or push it", "not_found")
    if artifact.kind != "snapshot":
        raise Failure(f"{want.pull_from} contains a template: use sandbox_template with from: artifact", "invalid")
    after = {
        "name": name,
        "description": artifact.description,
        "source_sandbox_id": "",
        "status": "ready",
        "mounts": [],
        "volumes": [],
        "imported_from": artifact.snapshot_id,
        **artifact.sizes,
    }
    request = {
        "reference": want.pull_from,
        "digest": artifact.digest,
        "name": name,
        "trust": list(want.trust),
        "data_bytes": artifact.data_bytes,
    }
    return Action("pull", (Change(name, None, after, SNAPSHOT),), request)


def _plan_private_file(
    want: DesiredState, file: SnapshotFile, name: str, current_view: Mapping[str, Any]
) -> list[Action]:
    """Plan to remove the permissions of other users for a file, which contains the guest's memory."""
    if file.mode & ~PRIVATE_MODE == 0:
        return []
    before = {**current_view, "file_mode": f"{file.mode:04o}"}
    after = {**current_view, "file_mode": f"{PRIVATE_MODE:04o}"}
    return [Action("protect", (Change(name, before, after, SNAPSHOT),), {"name": name, "file": want.export_to})]


def _is_exported(want: DesiredState, have: CurrentState, snapshot: Mapping[str, Any], file: SnapshotFile) -> bool:
    """Return whether the file contains what an export would write. `sandboxctl` can export without the memory."""
    has_memory = snapshot["memory"] != "none"
    return (
        file.is_complete
        and file.snapshot_id == snapshot["id"]
        and file.has_memory == has_memory
        and file.recipients == want.age_recipients
        and _needs_same_base(want, have, file)
    )


def _needs_same_base(want: DesiredState, have: CurrentState, file: SnapshotFile) -> bool:
    """Return whether the file was exported since ``export_since``, which may have been removed afterwards."""
    if not want.export_since:
        return not file.base_refs
    if have.base is not None:
        return have.base["id"] in file.base_refs[:1]
    return want.export_since in file.base_refs


def _plan_import(want: DesiredState, have: CurrentState, name: str) -> Action:
    _require_transferable(have)
    file = require_complete_file(have.file, want.import_from)
    if file.manifest.get("kind") != "snapshot":
        raise Failure(
            f"{want.import_from} contains a template: import it with `sandboxctl snapshot import`", "unsupported"
        )
    after = {
        "name": name,
        "description": file.manifest.get("description", ""),
        "source_sandbox_id": "",
        "status": "ready",
        "mounts": [],
        "volumes": [],
        "imported_from": file.snapshot_id,
        **{key: file.manifest["sizes"][key] for key in ("cpus", "memory_mb", "disk_mb")},
    }
    request = {
        "file": want.import_from,
        "name": name,
        "trust": list(want.trust),
        "snapshot": file.snapshot_id,
        "data_bytes": file.data_bytes,
    }
    if want.age_identity:
        request["identity"] = want.age_identity
    return Action("import", (Change(name, None, after, SNAPSHOT),), request)


def _plan_capture(
    want: DesiredState, name: str, sandbox: Mapping[str, Any], condition: str, *, is_expected: bool
) -> Action:
    for volume in want.volumes or ():
        if all(each["name"] != volume for each in sandbox["volumes"]):
            raise _refusals.create_volume_not_mounted_error(volume, sandbox["name"], sandbox["id"])
    if want.prewarm and want.memory == "none":
        raise _refusals.create_prewarm_without_memory_error("snapshot", name)
    body: dict[str, Any] = {"name": name, "description": want.description or "", "memory": want.memory}
    if want.volumes:
        body["volumes"] = list(want.volumes)
    if want.expires_in is not None:
        body["expiresIn"] = want.expires_in
    if want.retention is not None:
        body["retention"] = dict(want.retention)
    after = predict_captured_view(name, sandbox, want.description, want.volumes or ())
    if want.prewarm:
        body["prewarm"] = after["prewarm"] = want.prewarm
    request = {"sandbox": sandbox["id"], "ref": want.sandboxes[name], "body": body}
    if want.export_to:
        request["file"] = want.export_to
    return Action("capture", (Change(name, None, after, SNAPSHOT),), request, condition, is_expected)


def plan_prewarm(
    name: str, current_shape: Mapping[str, Any], before: Mapping[str, Any], count: int | None, kind: str
) -> list[Action]:
    """Plan to keep ``count`` forks of an existing snapshot or template ready. ``before`` is its current view."""
    if count is None or count == current_shape["prewarm"]:
        return []
    if count and current_shape["memory"] == "none":
        raise _refusals.create_prewarm_without_memory_error(kind, name)
    before = {**before, "prewarm": current_shape["prewarm"]}
    request = {"path": f"/snapshots/{quote_segment(current_shape['id'])}/prewarm", "count": count}
    return [Action("prewarm", (Change(name, before, {**before, "prewarm": count}, kind),), request)]


def check_running_for_capture(ref: str, sandbox: Mapping[str, Any]) -> None:
    """Raise Failure if the sandbox is paused, because only running sandboxes can be captured."""
    if sandbox["state"] != "running":
        raise _refusals.create_paused_for_capture_error(ref, sandbox["id"])


def predict_captured_view(
    name: str, sandbox: Mapping[str, Any], description: str | None, volumes: Iterable[str] = ()
) -> dict[str, Any]:
    return {
        "name": name,
        "description": description or "",
        "source_sandbox_id": sandbox["id"],
        "status": "ready",
        "mounts": sandbox["volumes"],
        "volumes": sorted(volumes),
        **{key: sandbox[key] for key in ("cpus", "memory_mb", "disk_mb")},
    }


def find_unchanged_snapshot(
    want: DesiredState, have: CurrentState, sandbox: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the sandbox's last snapshot if a new one would be the same, or None.

    They are the same if the file system has not changed and the last snapshot includes the requested volumes.
    """
    head = have.heads.get(sandbox["snapshot_id"])
    if head is None or head["source_sandbox_id"] != sandbox["id"] or sandbox["diverged"] is not False:
        return None
    return head if set(want.volumes or ()) <= set(head["volumes"]) else None


def _check_differences(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> None:
    """Raise Failure if the existing snapshot differs from the request, because snapshots cannot change."""
    if want.import_from or want.pull_from:
        _check_import_origin(want, have, name, current_shape)
        return
    sandbox = have.sandboxes.get(want.sandboxes.get(name, ""))
    differences = []
    if sandbox is not None and current_shape["source_sandbox_id"] != sandbox["id"]:
        differences.append(f"captures sandbox {current_shape['source_sandbox_id']}, not {want.sandboxes[name]!r}")
    if want.description is not None and current_shape["description"] != want.description:
        differences.append(f"has the description {current_shape['description']!r}")
    if want.memory == "none" and current_shape["memory"] != "none":
        differences.append("includes memory")
    if want.volumes is not None and current_shape["volumes"] != sorted(want.volumes):
        differences.append(
            f"includes the volumes {', '.join(current_shape['volumes'])}"
            if current_shape["volumes"]
            else "includes no volumes"
        )
    if differences:
        raise Failure(
            f"snapshot {name!r} already exists and {' and '.join(differences)}: a snapshot never changes, so choose "
            "another name, or remove it first with state: absent",
            "conflict",
            blockers=[current_shape["id"]],
        )


def _check_import_origin(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> None:
    """Raise Failure unless the existing snapshot comes from the file or artifact."""
    source = have.artifact if want.pull_from else have.file
    if conflict := find_origin_conflict(
        source, want.pull_from or want.import_from, current_shape["imported_from"], other_origin="was captured"
    ):
        raise Failure(
            f"snapshot {name!r} already exists and {conflict}: choose another name, or remove the snapshot first with "
            "state: absent",
            "conflict",
            blockers=[current_shape["id"]],
        )
    _require_transferable(have)


def _plan_removal(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> Action:
    check_unused("snapshot", name, have.users.get(current_shape["id"]))
    request = {"path": f"/snapshots/{quote_segment(current_shape['id'])}", "when_unused": want.when_unused}
    return Action("remove", (Change(name, make_view(current_shape), None, SNAPSHOT),), request)


def check_unused(kind: str, name: str, users: Users | None) -> None:
    """Raise Failure if ``users`` is not None, which means that the resource is in use."""
    if users is not None:
        raise _refusals.create_in_use_error(kind, name, users)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure."""
    request = action.request
    if action.verb == "capture":
        if "file" in request:
            require_writable_file(client, request["file"])
        with removal_explained("sandbox", request["ref"], request["sandbox"]):
            client.post(f"/sandboxes/{quote_segment(request['sandbox'])}/snapshots", dict(request["body"]))
    elif action.verb == "export":
        path = f"/snapshots/{quote_segment(request['name'])}"
        export_to_file(client, path, request["file"], request.get("since", ""), request.get("recipients", ()))
    elif action.verb == "protect":
        protect_file(client, request["file"])
    elif action.verb == "import":
        import_from_file(
            client,
            "/snapshots",
            request["file"],
            request.get("identity", ""),
            name=request["name"],
            trust=request["trust"],
        )
    elif action.verb == "push":
        push(client, f"/snapshots/{quote_segment(request['name'])}", request["reference"])
    elif action.verb == "pull":
        # If the tag is moved meanwhile, pull what was planned.
        reference = replace_tag(request["reference"], request["digest"])
        pull(client, "/snapshots", reference, request["name"], request["trust"])
    elif action.verb == "prewarm":
        client.post(request["path"], {"count": request["count"]})
    elif action.verb == "remove":
        client.delete(request["path"], when="unused" if request["when_unused"] else "")
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    """Return the keys of the result's lists, in order, with the names of the resources in each list."""
    return {PLURAL: want.names}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    """Return snapshots by name. A name that ``when_changed`` skipped maps to the sandbox's last snapshot."""
    result = dict(have.resources)
    for name, ref in want.sandboxes.items():
        sandbox = have.sandboxes.get(ref)
        if name not in result and sandbox is not None and want.when_changed:
            head = find_unchanged_snapshot(want, have, sandbox)
            if head is not None:
                result[name] = head
    return result
