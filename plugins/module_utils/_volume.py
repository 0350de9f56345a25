# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_volume``: create, change and remove volumes, with their snapshots, attachments and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._age import parse_identity, parse_recipients
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    check_no_overlap,
    check_running,
    validate_path,
)
from ansible_collections.grove.sandbox.plugins.module_utils._names import find_taken_names
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    VOLUME,
    Action,
    Change,
    Plan,
    Planner,
    require_minimum,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    VOLUME_KEYS,
    make_sandbox_shape,
    make_volume_shape,
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

SINGULAR, PLURAL = "volume", "volumes"
RESULT_KEYS = {PLURAL: VOLUME_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "size_mb": {"type": "int"},
    "from_snapshot": {"type": "str"},
    "attachments": {
        "type": "list",
        "elements": "dict",
        "options": {
            "sandbox": {"type": "str", "required": True},
            "path": {"type": "str", "required": True},
            "read_only": {"type": "bool", "default": False},
        },
    },
    "snapshots": {"type": "list", "elements": "str"},
    "absent_snapshots": {"type": "list", "elements": "str"},
    "rollback_to": {"type": "str"},
    "export_to": {"type": "path"},
    "age_recipients": {"type": "list", "elements": "str"},
    "import_from": {"type": "path"},
    "age_identity": {"type": "path"},
    "trust": {"type": "list", "elements": "str"},
    "force": {"type": "bool", "default": False},
    "purge": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {
    "required_by": {
        "trust": ("import_from",),
        "export_to": ("snapshots",),
        "age_recipients": ("export_to",),
        "age_identity": ("import_from",),
    },
    "mutually_exclusive": [("import_from", "export_to"), ("import_from", "from_snapshot")],
}

DEFAULT_SIZE_MB = 1024
MIN_SIZE_MB = 64


@dataclass(frozen=True)
class DesiredState:
    """The user's options. None means that an option is not set.

    ``attachments`` maps each sandbox to (path, read-only).
    """

    names: tuple[str, ...]
    state: str
    size_mb: int | None = None
    source: tuple[str, str] | None = None
    attachments: Mapping[str, tuple[str, bool]] | None = None
    snapshots: tuple[str, ...] | None = None
    absent_snapshots: tuple[str, ...] = ()
    rollback_to: str = ""
    force: bool = False
    purge: bool = False
    export_to: str = ""
    age_recipients: tuple[str, ...] = ()
    import_from: str = ""
    age_identity: str = ""
    trust: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurrentState:
    """The state of the gateway that a plan needs.

    ``resources`` maps the requested names to volumes. ``source`` is the snapshot to copy, or None if it does not exist.
    ``snapshot_refs`` holds the names and ids of each volume's snapshots, including those captured with sandboxes.
    ``snapshot_ids`` maps the names of each volume's snapshots to their ids. ``file``: the file of an export or import,
    if it exists.
    """

    resources: Mapping[str, Mapping[str, Any]]
    snapshot_refs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sandboxes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    taken_names: Mapping[str, str] = field(default_factory=dict)
    snapshot_ids: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    file: SnapshotFile | None = None
    file_failure: Failure | None = None
    """Why the file cannot be used, or why the gateway cannot export or import snapshots."""


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    names = validate_names(params["name"], "volume")
    attachments = _parse_attachments(params.get("attachments"))
    is_absent = params["state"] == "absent"
    if attachments and len(names) > 1:
        raise Failure(
            f"attachments are set for {len(names)} volumes, but a sandbox cannot mount two volumes at one "
            "path: use one task for each volume"
        )
    if attachments and is_absent:
        raise Failure(
            "with state: absent, a volume cannot have attachments: set attachments to [] to detach it everywhere"
        )
    snapshots = params.get("snapshots")
    rollback_to = params.get("rollback_to") or ""
    if rollback_to and params.get("purge") and snapshots is not None and rollback_to not in snapshots:
        raise Failure(
            f"rollback_to {rollback_to!r} is not in snapshots, and purge would remove it: add it to snapshots"
        )
    absent_snapshots = _parse_absent_snapshots(params)
    _check_file_options(params, names)
    return DesiredState(
        names=names,
        state=params["state"],
        size_mb=require_minimum(params.get("size_mb"), MIN_SIZE_MB, "size_mb"),
        source=_parse_source(params.get("from_snapshot")),
        attachments=attachments,
        snapshots=validate_names(snapshots, "snapshot") if snapshots else None if snapshots is None else (),
        absent_snapshots=absent_snapshots,
        rollback_to=rollback_to,
        force=bool(params.get("force")),
        purge=bool(params.get("purge")),
        export_to=params.get("export_to") or "",
        age_recipients=parse_recipients(params.get("age_recipients")),
        import_from=params.get("import_from") or "",
        age_identity=parse_identity(params.get("age_identity")),
        trust=tuple(params.get("trust") or ()),
    )


def _parse_absent_snapshots(params: Mapping[str, Any]) -> tuple[str, ...]:
    option = params.get("absent_snapshots")
    if not option:
        return ()
    if params["state"] == "absent":
        raise Failure("absent_snapshots is valid only with state: present: with state: absent, set purge: true")
    needed_names = {*(params.get("snapshots") or ()), params.get("rollback_to")}
    if conflicting_names := sorted(needed_names.intersection(option)):
        raise Failure(
            f"absent_snapshots contains {', '.join(conflicting_names)}, which the task also needs: remove it from "
            "absent_snapshots, or from snapshots and rollback_to"
        )
    return validate_names(option, "snapshot")


def _check_file_options(params: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if not (params.get("export_to") or params.get("import_from")):
        return
    if params["state"] == "absent":
        raise Failure("export_to and import_from are valid only with state: present: remove them")
    if len(names) != 1:
        raise Failure(f"a file contains one volume, but there are {len(names)} names: use one task for each")
    if params.get("export_to") and len(params.get("snapshots") or ()) != 1:
        raise Failure(
            f"a file contains one snapshot, but there are {len(params.get('snapshots') or ())} entries in snapshots: "
            "list only the snapshot to export"
        )


def _parse_attachments(option: Iterable[Mapping[str, Any]] | None) -> dict[str, tuple[str, bool]] | None:
    if option is None:
        return None
    result: dict[str, tuple[str, bool]] = {}
    for each in option:
        if each["sandbox"] in result:
            raise Failure(
                f"sandbox {each['sandbox']!r} is listed twice, but it can mount the volume at only one path: "
                "list it once"
            )
        result[each["sandbox"]] = (validate_path(each["path"]), bool(each.get("read_only")))
    return result


def _parse_source(option: str | None) -> tuple[str, str] | None:
    if not option:
        return None
    volume, _separator, snapshot = option.partition("@")
    if not volume or not snapshot:
        raise Failure(f"from_snapshot {option!r} does not name a snapshot of a volume: use the form VOLUME@SNAPSHOT")
    return volume, snapshot


def observe(client: Client, want: DesiredState) -> CurrentState:
    resources, snapshot_refs, snapshot_ids = {}, {}, {}
    for name in want.names:
        entry = client.find(f"/volumes/{quote_segment(name)}")
        if entry is not None:
            snapshots = list(client.list_all(f"/volumes/{quote_segment(name)}/snapshots"))
            resources[name] = make_volume_shape(entry, snapshots)
            snapshot_refs[name] = frozenset(ref for each in snapshots for ref in (each["name"], each["snapshotID"]))
            snapshot_ids[name] = {each["name"]: each["snapshotID"] for each in snapshots}
    if want.state == "absent":
        return CurrentState(resources, snapshot_refs)
    sandboxes = {}
    for ref in want.attachments or ():
        detail = client.find(f"/sandboxes/{quote_segment(ref)}")
        if detail is not None:
            sandboxes[ref] = make_sandbox_shape(detail)
    missing_names = [name for name in want.names if name not in resources]
    taken_names = find_taken_names(client, missing_names, excluded_kind="volume")
    file, file_failure = None, None
    if want.export_to:
        file, file_failure = observe_exported_file(client, want.export_to, want.age_recipients, has_volume=True)
    elif want.import_from:
        file, file_failure = observe_imported_file(client, want.import_from, want.age_identity, has_volume=True)
    return CurrentState(
        resources,
        snapshot_refs,
        sandboxes,
        _find_source(client, want),
        taken_names,
        snapshot_ids,
        file=file,
        file_failure=file_failure,
    )


def _find_source(client: Client, want: DesiredState) -> Mapping[str, Any] | None:
    if want.source is None:
        return None
    volume, snapshot = want.source
    path = f"/volumes/{quote_segment(volume)}"
    if client.find(path) is None:
        return None
    entries = client.list_all(f"{path}/snapshots")
    return next((each for each in entries if snapshot in (each["name"], each["snapshotID"])), None)


def make_view(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a volume that a task can declare."""
    fields = {key: shape[key] for key in ("name", "size_mb", "attachments", "snapshots", "from_snapshot")}
    return {**fields, "imported_from": shape["imported_from"]} if shape["imported_from"] else fields


def list_named_paths(want: DesiredState, have: CurrentState) -> tuple[str, ...]:
    return ()


def plan(want: DesiredState, have: CurrentState) -> Plan:
    planner = Planner()
    for name in want.names:
        plan_one = partial(_plan_volume, want, have, name)
        if want.import_from and name in have.resources:
            imported_from = have.resources[name]["imported_from"]
            add_import_plan(planner, name, plan_one, have.file, want.import_from, imported_from)
        else:
            planner.add(name, plan_one)
    return planner.plan()


def _plan_volume(want: DesiredState, have: CurrentState, name: str) -> list[Action]:
    current_shape = have.resources.get(name)
    if want.state == "absent":
        return [] if current_shape is None else _plan_removal(want, name, current_shape)
    volume_plan = _VolumePlan(want, have, name)
    if current_shape is None:
        volume_plan.plan_import() if want.import_from else volume_plan.plan_creation()
    else:
        volume_plan.before = make_view(current_shape)
        _check_source(want, have, name, current_shape)
        _check_import_origin(want, have, name, current_shape)
    volume_plan.plan_detachment()
    volume_plan.plan_capture()
    volume_plan.plan_export()
    volume_plan.plan_rollback()
    volume_plan.plan_growth()
    volume_plan.plan_attachment()
    volume_plan.plan_snapshot_removal()
    return volume_plan.actions


class _VolumePlan:
    """Builds the plan of one volume step by step.

    Call its methods in this order: create or import, detach, capture, export, roll back, grow, attach, remove surplus
    snapshots.
    """

    def __init__(self, want: DesiredState, have: CurrentState, name: str) -> None:
        self.want = want
        self.have = have
        self.name = name
        self.before: dict[str, Any] | None = None
        self.actions: list[Action] = []
        self.owner_id = have.resources.get(name, {}).get("owner_sandbox_id", "")

    def _add_step(self, verb: str, request: Mapping[str, Any], **changes: Any) -> None:
        after = {**(self.before or {}), **changes}
        self.actions.append(Action(verb, (Change(self.name, self.before, after, VOLUME),), request))
        self.before = after

    @property
    def _current_view(self) -> dict[str, Any]:
        if self.before is None:
            raise LookupError(f"volume {self.name} does not exist")
        return self.before

    def _require_free_name(self) -> None:
        if self.name in self.have.taken_names:
            raise _refusals.create_name_taken_error(self.name, self.have.taken_names[self.name])

    def plan_import(self) -> None:
        want = self.want
        self._require_free_name()
        if self.have.file_failure is not None:
            raise self.have.file_failure
        file = require_complete_file(self.have.file, want.import_from)
        size_mb = file.manifest["size_mb"]
        if want.size_mb is not None and want.size_mb < size_mb:
            raise _refusals.create_volume_too_small_error(self.name, want.size_mb, size_mb)
        request = {
            "file": want.import_from,
            "trust": list(want.trust),
            "snapshot": file.snapshot_id,
            "data_bytes": file.data_bytes,
        }
        if want.age_identity:
            request["identity"] = want.age_identity
        new_view = {"name": self.name, "size_mb": size_mb, "attachments": [], "snapshots": [], "from_snapshot": ""}
        self._add_step("import", request, **new_view, imported_from=file.snapshot_id)

    def plan_creation(self) -> None:
        want, source = self.want, self.have.source
        self._require_free_name()
        if want.source is not None and source is None:
            raise Failure(
                f"snapshot {want.source[1]!r} of volume {want.source[0]!r} not found: use an existing snapshot",
                "not_found",
            )
        minimum_mb = source["sizeMB"] if source is not None else MIN_SIZE_MB
        size_mb = want.size_mb or (source["sizeMB"] if source is not None else DEFAULT_SIZE_MB)
        if size_mb < minimum_mb:
            raise _refusals.create_volume_too_small_error(self.name, size_mb, minimum_mb)
        body: dict[str, Any] = {"name": self.name, "sizeMB": size_mb}
        if source is not None:
            body["fromSnapshot"] = source["snapshotID"]
        new_view = {
            "name": self.name,
            "size_mb": size_mb,
            "attachments": [],
            "snapshots": [],
            "from_snapshot": body.get("fromSnapshot", ""),
        }
        self._add_step("create", {"body": body}, **new_view)

    def _list_requested_attachments(self) -> list[dict[str, Any]]:
        """Return the requested attachments as they appear in the volume's shape. Raises Failure."""
        attachments = []
        for ref, (path, read_only) in (self.want.attachments or {}).items():
            sandbox = self.have.sandboxes.get(ref)
            if sandbox is None:
                raise Failure(
                    f"sandbox {ref!r} does not exist, so volume {self.name!r} cannot be attached to it: "
                    "create the sandbox first, or remove it from attachments",
                    "not_found",
                )
            entry = {"sandbox": sandbox["name"], "sandbox_id": sandbox["id"], "path": path, "read_only": read_only}
            attachments.append({**entry, "state": sandbox["state"]})
        sandbox_ids = [entry["sandbox_id"] for entry in attachments]
        for entry in attachments:
            if sandbox_ids.count(entry["sandbox_id"]) > 1:
                raise Failure(f"sandbox {entry['sandbox']!r} is listed twice, by its name and by its id: list it once")
        return attachments

    def plan_detachment(self) -> None:
        if self.want.attachments is None:
            return
        requested_properties = [_get_fixed_properties(entry) for entry in self._list_requested_attachments()]
        surplus_attachments = [
            each
            for each in self._current_view["attachments"]
            if _get_fixed_properties(each) not in requested_properties
        ]
        if self.owner_id and surplus_attachments and len(surplus_attachments) == len(self._current_view["attachments"]):
            raise Failure(
                f"volume {self.name!r} is a private clone for sandbox {self.owner_id}, and detaching it from its last "
                "sandbox removes it: keep this attachment, or remove the volume with state: absent and attachments: []",
                "conflict",
                blockers=[self.owner_id],
            )
        for entry in surplus_attachments:
            remaining_attachments = [each for each in self._current_view["attachments"] if each != entry]
            self._add_step("detach", {"sandbox": entry["sandbox_id"]}, attachments=remaining_attachments)

    def plan_capture(self) -> None:
        for snapshot in self.want.snapshots or ():
            if snapshot not in self._current_view["snapshots"]:
                snapshots = sorted([*self._current_view["snapshots"], snapshot])
                request = {"snapshot": snapshot, **({"file": self.want.export_to} if self.want.export_to else {})}
                self._add_step("capture", request, snapshots=snapshots)

    def plan_export(self) -> None:
        """Plan to export the only requested snapshot, unless the file already contains it."""
        if not self.want.export_to:
            return
        if self.have.file_failure is not None:
            raise self.have.file_failure
        (snapshot,) = self.want.snapshots or ("",)
        file, path, recipients = self.have.file, self.want.export_to, self.want.age_recipients
        snapshot_id = self.have.snapshot_ids.get(self.name, {}).get(snapshot, "")
        expected = (True, snapshot_id, recipients)
        if file is None or (file.is_complete, file.snapshot_id, file.recipients) != expected:
            overwritten_id = file.snapshot_id if file is not None else ""
            request: dict[str, Any] = {"snapshot": snapshot, "file": path, "overwrites": overwritten_id}
            changes: dict[str, Any] = {"exported_to": path}
            if recipients:
                request["recipients"] = changes["encrypted_for"] = list(recipients)
            self._add_step("export", request, **changes)
        elif file.mode & ~PRIVATE_MODE:
            self.before = {**self._current_view, "file_mode": f"{file.mode:04o}"}
            self._add_step("protect", {"file": path}, file_mode=f"{PRIVATE_MODE:04o}")

    def plan_rollback(self) -> None:
        target = self.want.rollback_to
        if not target:
            return
        if target not in self._current_view["snapshots"] and target not in self.have.snapshot_refs.get(self.name, ()):
            raise Failure(
                f"snapshot {target!r} of volume {self.name!r} not found: use an existing snapshot", "not_found"
            )
        writers = [each for each in self._current_view["attachments"] if not each["read_only"]]
        if writers and not self.want.force:
            raise _refusals.create_volume_has_writers_error(self.name, writers)
        self._add_step("rollback", {"snapshot": target, "force": self.want.force}, content_of=target)

    def plan_growth(self) -> None:
        size_mb = self.want.size_mb
        if size_mb is None or size_mb == self._current_view["size_mb"]:
            return
        if size_mb < self._current_view["size_mb"]:
            raise _refusals.create_volume_cannot_shrink_error(self.name, self._current_view["size_mb"], size_mb)
        self._add_step("grow", {"size_mb": size_mb}, size_mb=size_mb)

    def plan_attachment(self) -> None:
        if self.want.attachments is None:
            return
        existing_properties = [_get_fixed_properties(each) for each in self._current_view["attachments"]]
        for entry in self._list_requested_attachments():
            if _get_fixed_properties(entry) in existing_properties:
                continue
            sandbox = next(each for each in self.have.sandboxes.values() if each["id"] == entry["sandbox_id"])
            check_running(sandbox["name"], sandbox, sandbox["id"])
            other_paths = [each["path"] for each in sandbox["volumes"] if each["name"] != self.name]
            check_no_overlap([*other_paths, entry["path"]])
            attachments = sorted(
                [*self._current_view["attachments"], entry], key=lambda each: (each["sandbox"], each["sandbox_id"])
            )
            body = {"name": self.name, "path": entry["path"], "readOnly": entry["read_only"]}
            self._add_step("attach", {"sandbox": sandbox["id"], "body": body}, attachments=attachments)

    def plan_snapshot_removal(self) -> None:
        surplus_snapshots = [each for each in self._current_view["snapshots"] if each in self.want.absent_snapshots]
        if self.want.purge and self.want.snapshots is not None:
            surplus_snapshots = [each for each in self._current_view["snapshots"] if each not in self.want.snapshots]
        for snapshot in surplus_snapshots:
            remaining_snapshots = [each for each in self._current_view["snapshots"] if each != snapshot]
            self._add_step("remove_snapshot", {"snapshot": snapshot}, snapshots=remaining_snapshots)


def _get_fixed_properties(entry: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the properties of an attachment that cannot change unless the volume is detached."""
    return entry["sandbox_id"], entry["path"], entry["read_only"]


def _check_source(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> None:
    """Raise Failure if the volume was created from another source, unless the requested snapshot no longer exists."""
    if (
        want.source is not None
        and (have.source or {}).get("snapshotID", current_shape["from_snapshot"]) != current_shape["from_snapshot"]
    ):
        origin_text = f"from snapshot {current_shape['from_snapshot']}" if current_shape["from_snapshot"] else "empty"
        raise Failure(
            f"volume {name!r} was created {origin_text}, not from {'@'.join(want.source)}, which cannot change: choose "
            "another name, or remove it first with state: absent, which loses its contents",
            "conflict",
        )


def _check_import_origin(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> None:
    """Raise Failure unless the existing volume was imported from the file, if the task imports one."""
    if not want.import_from:
        return
    if conflict := find_origin_conflict(
        have.file, want.import_from, current_shape["imported_from"], other_origin="was created"
    ):
        raise Failure(
            f"volume {name!r} already exists and {conflict}: choose another name, or remove the volume first with "
            "state: absent, which loses its contents",
            "conflict",
        )
    if have.file_failure is not None:
        raise have.file_failure


def _plan_removal(want: DesiredState, name: str, current_shape: Mapping[str, Any]) -> list[Action]:
    """Return the actions that detach the volume, if requested, and remove it.

    Raises Failure if something prevents the removal. Its message lists all reasons.
    """
    before = make_view(current_shape)
    should_detach = want.attachments is not None
    attachments = [] if should_detach else current_shape["attachments"]
    snapshots = [] if want.purge else current_shape["snapshots"]
    captured_by = current_shape["captured_by"]
    if attachments or snapshots or captured_by:
        raise _refusals.create_volume_in_use_error(
            name, attachments=attachments, snapshots=snapshots, captured_by=captured_by
        )
    actions = []
    for number, entry in enumerate(current_shape["attachments"], 1):
        after: dict[str, Any] | None = {**before, "attachments": current_shape["attachments"][number:]}
        if (
            current_shape["owner_sandbox_id"]
            and number == len(current_shape["attachments"])
            and not current_shape["snapshots"]
        ):
            after = None
        actions.append(Action("detach", (Change(name, before, after, VOLUME),), {"sandbox": entry["sandbox_id"]}))
        if after is None:
            # The gateway removes a sandbox's private clone when its last attachment is removed.
            return actions
        before = after
    request = {"with_snapshots": want.purge}
    return [*actions, Action("remove", (Change(name, before, None, VOLUME),), request)]


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure."""
    request, name = action.request, action.changes[0].name
    path = f"/volumes/{quote_segment(name)}"
    if action.verb == "create":
        client.post("/volumes", dict(request["body"]))
    elif action.verb == "detach":
        client.delete(f"/sandboxes/{quote_segment(request['sandbox'])}/volumes/{quote_segment(name)}")
    elif action.verb == "attach":
        client.post(f"/sandboxes/{quote_segment(request['sandbox'])}/volumes", dict(request["body"]))
    elif action.verb == "import":
        import_from_file(
            client, "/volumes", request["file"], request.get("identity", ""), name=name, trust=request["trust"]
        )
    elif action.verb == "capture":
        if "file" in request:
            require_writable_file(client, request["file"])
        client.post(f"{path}/snapshots", {"name": request["snapshot"]})
    elif action.verb == "export":
        snapshot_path = f"{path}/snapshots/{quote_segment(request['snapshot'])}"
        export_to_file(client, snapshot_path, request["file"], recipients=request.get("recipients", ()))
    elif action.verb == "protect":
        protect_file(client, request["file"])
    elif action.verb == "rollback":
        client.post(f"{path}/rollback", dict(request))
    elif action.verb == "grow":
        client.patch(path, {"sizeMB": request["size_mb"]})
    elif action.verb == "remove_snapshot":
        client.delete(f"{path}/snapshots/{quote_segment(request['snapshot'])}")
    elif action.verb == "remove":
        client.delete(path, withSnapshots=request["with_snapshots"])
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    """Return the keys of the result's lists, in order, with the names of the resources in each list."""
    return {PLURAL: want.names}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    return have.resources
