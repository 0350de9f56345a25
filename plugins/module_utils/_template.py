# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_template``: build templates from recipes, pull them from registries, and remove them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._artifacts import (
    Artifact,
    find_artifact,
    pull,
    replace_tag,
)
from ansible_collections.grove.sandbox.plugins.module_utils._build_context import (
    ContextError,
    TranslatedDockerfile,
    translate_dockerfile,
)
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._fields import LOGIN_FIELDS, RECIPE_FIELDS, replace_fields
from ansible_collections.grove.sandbox.plugins.module_utils._names import find_taken_names
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    ARCHIVES_KEY,
    LOGIN_KEY,
    TEMPLATE,
    Action,
    Change,
    Plan,
    Planner,
    failures_conditional,
    require_minimum,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    TEMPLATE_KEYS,
    make_template_shape,
)
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot import check_unused, find_users, plan_prewarm

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._build_context import Archive
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "template", "templates"
RESULT_KEYS = {PLURAL: TEMPLATE_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "from": {"type": "str", "choices": ["debootstrap", "rootfs", "image", "artifact"]},
    "suite": {"type": "str", "default": "bookworm"},
    "mirror": {"type": "str", "default": ""},
    "packages": {"type": "list", "elements": "str", "default": []},
    "path": {"type": "str", "default": ""},
    "image": {"type": "str", "default": ""},
    "dockerfile": {"type": "path"},
    "context": {"type": "path"},
    "registry_username": {"type": "str"},
    "registry_password": {"type": "str", "no_log": True},
    "artifact": {"type": "str", "default": ""},
    "trust": {"type": "list", "elements": "str"},
    "setup": {"type": "list", "elements": "str", "default": []},
    "start_command": {"type": "str", "default": ""},
    "ready_probe": {"type": "str", "default": ""},
    "ready_timeout": {"type": "float", "default": 60},
    "setup_timeout": {"type": "float", "default": 1800},
    "setup_network": {"type": "bool"},
    "cpus": {"type": "int", "default": 1},
    "memory_mb": {"type": "int", "default": 256},
    "disk_mb": {"type": "int", "default": 2048},
    "prewarm": {"type": "int"},
    "rebuild_outdated": {"type": "bool", "default": True},
    "wait_timeout": {"type": "int", "default": 3600},
    "when_unused": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {
    "required_if": [("from", "rootfs", ("path",)), ("from", "image", ("image",)), ("from", "artifact", ("artifact",))],
    "required_together": [("registry_username", "registry_password")],
    "required_by": {"trust": ("artifact",), "context": ("dockerfile",)},
}

LOG_TAIL_LINE_COUNT = 20
"""Number of log lines quoted in the message of a failed build."""
POLL_SECONDS = (0.1, 2.0)
"""The first and the longest delay between two queries of a build's status."""


@dataclass(frozen=True)
class DesiredState:
    """The user's options. ``recipe`` maps the names of module options to values, including defaults.

    ``login``: the fields of a request that contain the user name and the password for the image's registry, if any.
    ``dockerfile``: the path of a Dockerfile, from which the recipe is completed, or "".
    """

    names: tuple[str, ...]
    state: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    login: Mapping[str, str] = field(default_factory=dict)
    prewarm: int | None = None
    rebuild_outdated: bool = True
    wait_timeout: int = 0
    when_unused: bool = False
    artifact: str = ""
    trust: tuple[str, ...] = ()
    dockerfile: str = ""
    context: str = ""


@dataclass(frozen=True)
class CurrentState:
    """The state of the gateway that a plan needs. ``origins``: the ids of the snapshots that templates come from.

    ``dockerfile``: the translation of the task's Dockerfile, if it has one. ``dockerfile_failure``: why it has none.
    """

    resources: Mapping[str, Mapping[str, Any]]
    taken_names: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    artifact: Artifact | None = None
    artifact_failure: Failure | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    build_failures: Mapping[str, Failure] = field(default_factory=dict)
    """The failures of builds that were already running, by the names of their templates."""
    dockerfile: TranslatedDockerfile | None = None
    dockerfile_failure: Failure | None = None


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    recipe = {option: params[option] for option in RECIPE_FIELDS}
    artifact = params.get("artifact") or ""
    names = validate_names(params["name"], "template")
    if artifact and recipe["from"] not in (None, "artifact"):
        raise Failure(f"artifact cannot be combined with from: {recipe['from']}: remove one of them")
    if artifact and params["state"] == "absent":
        raise Failure("artifact cannot be combined with state: absent: remove one of them")
    if artifact and len(names) != 1:
        raise Failure(f"an artifact contains one template, but there are {len(names)} names: use one task for each")
    dockerfile = params.get("dockerfile") or ""
    if dockerfile:
        _check_dockerfile_options(params, artifact)
    default_source = "artifact" if artifact else "image" if recipe["image"] or dockerfile else "debootstrap"
    recipe["from"] = recipe["from"] or default_source
    recipe["packages"] = sorted(set(recipe["packages"]))
    if recipe["setup_network"] is None:
        recipe["setup_network"] = not dockerfile
    for option in ("cpus", "memory_mb", "disk_mb", "ready_timeout", "setup_timeout"):
        require_minimum(recipe[option], 1, option)
    return DesiredState(
        names=names,
        state=params["state"],
        recipe=recipe,
        login=_parse_login(params, recipe),
        prewarm=require_minimum(params.get("prewarm"), 0, "prewarm"),
        rebuild_outdated=params.get("rebuild_outdated") is not False,
        wait_timeout=require_minimum(params.get("wait_timeout") or 0, 0, "wait_timeout"),
        when_unused=bool(params.get("when_unused")),
        artifact=artifact,
        trust=tuple(params.get("trust") or ()),
        dockerfile=dockerfile,
        context=params.get("context") or "",
    )


def _check_dockerfile_options(params: Mapping[str, Any], artifact: str) -> None:
    """Raise Failure if an option contradicts ``dockerfile``."""
    if params["state"] == "absent":
        raise Failure("dockerfile cannot be combined with state: absent: remove one of them")
    if artifact:
        raise Failure("dockerfile cannot be combined with artifact: remove one of them")
    if params["from"] not in (None, "image"):
        raise Failure(f"dockerfile cannot be combined with from: {params['from']}: remove one of them")
    for option, remedy in (
        ("image", "name the image with FROM in the Dockerfile"),
        ("packages", "install them with RUN in the Dockerfile, and set setup_network"),
        ("path", "copy the files with COPY in the Dockerfile"),
    ):
        if params[option]:
            raise Failure(f"dockerfile cannot be combined with {option}: remove it, and {remedy}")


def _parse_login(params: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, str]:
    username, password = (params.get(option) or "" for option in ("registry_username", "registry_password"))
    if not username and not password:
        return {}
    if not username or not password:
        raise Failure("the login to the image's registry is incomplete: set registry_username and registry_password")
    if recipe["from"] != "image":
        raise Failure("registry_username and registry_password are valid only with image: set image, or remove them")
    return {LOGIN_FIELDS["registry_username"]: username, LOGIN_FIELDS["registry_password"]: password}


def observe(client: Client, want: DesiredState) -> CurrentState:
    resources = {}
    build_failures: dict[str, Failure] = {}
    dockerfile, dockerfile_failure = None, None
    # After the task has started a build, only its result is needed.
    if want.dockerfile and want.state != "absent" and not client.started_builds:
        try:
            dockerfile = _translate_dockerfile(client, want)
        except Failure as failure:
            dockerfile_failure = failure
    recipe = _complete_recipe(want, dockerfile)
    for name in want.names:
        entry = _find_template(client, name)
        try:
            has_waited = dockerfile_failure is None and _wait_for_running_build(client, want, recipe, name, entry)
        except Failure as failure:
            build_failures[name] = failure
            has_waited = True
        if has_waited:
            entry = _find_template(client, name)
        if entry is not None:
            shape = make_template_shape(entry)
            # At the end of a build, the template exists for a moment without its name.
            resources[name] = shape if shape["names"] else {**shape, "name": name, "names": [name]}
    if want.state == "absent":
        return CurrentState(resources, users={} if want.when_unused else find_users(client, resources.values()))
    missing_names = [name for name in want.names if name not in resources]
    taken_names = find_taken_names(client, missing_names, excluded_kind="template")
    if not want.artifact:
        return CurrentState(
            resources,
            taken_names,
            dockerfile=dockerfile,
            dockerfile_failure=dockerfile_failure,
            build_failures=build_failures,
        )
    artifact, artifact_failure = None, None
    try:
        artifact = find_artifact(client, want.artifact)
    except Failure as failure:
        artifact_failure = failure
    return CurrentState(
        resources,
        taken_names,
        artifact=artifact,
        artifact_failure=artifact_failure,
        origins=_find_origins(client, resources),
    )


def _find_template(client: Client, name: str) -> dict[str, Any] | None:
    # Until a new build has finished, the name belongs to the old template.
    return client.find(f"/templates/{quote_segment(client.started_builds.get(name, name))}")


def _wait_for_running_build(
    client: Client, want: DesiredState, recipe: Mapping[str, Any], name: str, entry: dict[str, Any] | None
) -> bool:
    """Wait for a build of the same recipe that an earlier task or another client has started. Raises Failure.

    The task then changes nothing, as a check-mode run predicts, which assumes that running builds succeed. Returns
    whether there was such a build. ``entry``: the gateway's description of the template before.
    """
    if want.state == "absent" or want.artifact or not want.wait_timeout or name in client.started_builds:
        return False
    if client.is_predicting and not client.is_planning:
        return False  # Only the builds of a plan session finish at once.
    if entry is None or _is_up_to_date(want, recipe, make_template_shape(entry)):
        return False
    has_waited = False
    entries = [entry] if entry.get("buildStatus") == "building" else client.list_all("/templates")
    for each in entries:
        shape = make_template_shape(each)
        if shape["status"] == "building" and shape["name"] == name and _has_same_recipe(recipe, shape):
            has_waited = True
            try:
                _wait_for_build(client, name, each, want.wait_timeout)
            except Failure:
                client.started_builds[name] = each["templateID"]  # Do not wait for it again.
                raise
    return has_waited


def _translate_dockerfile(client: Client, want: DesiredState) -> TranslatedDockerfile:
    """Translate the task's Dockerfile. Raises Failure.

    In a check-mode run, files that earlier tasks write do not exist yet.
    """
    with failures_conditional("only if no earlier task of the run writes the Dockerfile or files of its context"):
        try:
            return translate_dockerfile(client.post, want.dockerfile, want.context)
        except ContextError as error:
            raise Failure(str(error)) from None


def _complete_recipe(want: DesiredState, dockerfile: TranslatedDockerfile | None) -> dict[str, Any]:
    """Return the recipe with what the Dockerfile determines, if there is one."""
    recipe = dict(want.recipe)
    if dockerfile is not None:
        recipe["image"] = dockerfile.image
        recipe["setup"] = [*dockerfile.setup, *recipe["setup"]]
        recipe["start_command"] = recipe["start_command"] or dockerfile.start_command
    return recipe


def _find_origins(client: Client, resources: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the ids of the snapshots that the templates were imported from, in other gateways, by name."""
    origins = {}
    for name, shape in resources.items():
        detail = client.find(f"/snapshots/{quote_segment(shape['id'])}") or {}
        origins[name] = (detail.get("imported") or {}).get("snapshotID", "")
    return origins


def make_view(shape: Mapping[str, Any]) -> dict[str, Any]:
    outdated_field = {"outdated": True} if shape["outdated"] else {}
    prewarm_field = {"prewarm": shape["prewarm"]} if shape["prewarm"] else {}
    fields = {"name": shape["name"], "status": shape["status"], **outdated_field, **prewarm_field}
    return {**fields, "recipe": dict(shape["recipe"])}


def list_named_paths(want: DesiredState, have: CurrentState) -> tuple[str, ...]:
    return ()


def plan(want: DesiredState, have: CurrentState) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.add(name, lambda name=name: _plan_template(want, have, name))
    return planner.plan()


def _plan_template(want: DesiredState, have: CurrentState, name: str) -> list[Action]:
    current_shape = have.resources.get(name)
    if want.state == "absent":
        if current_shape is not None and current_shape["status"] == "building":
            raise _refusals.create_template_not_ready_error(name)
        return (
            []
            if current_shape is None or current_shape["status"] == "error"
            else [_plan_removal(want, have, name, current_shape)]
        )
    if name in have.build_failures:
        raise have.build_failures[name]
    if current_shape is None and name in have.taken_names:
        raise _refusals.create_name_taken_error(name, have.taken_names[name])
    if want.artifact:
        return _plan_pull(want, have, name, current_shape)
    if have.dockerfile_failure is not None:
        raise have.dockerfile_failure
    recipe = _complete_recipe(want, have.dockerfile)
    if current_shape is not None and _is_up_to_date(want, recipe, current_shape):
        if current_shape["status"] == "building":
            return []
        return plan_prewarm(name, current_shape, make_view(current_shape), want.prewarm, TEMPLATE)
    before = None if current_shape is None else make_view(current_shape)
    after: dict[str, Any] = {"name": name, "recipe": recipe}
    if before and "outdated" in before:
        after["outdated"] = False
    if want.wait_timeout:
        after["status"] = "ready"
    body = {"name": name, **{RECIPE_FIELDS[option]: value for option, value in recipe.items()}}
    if recipe["setup_network"]:  # Older gateways do not know the field, and always allow the network.
        del body[RECIPE_FIELDS["setup_network"]]
    if want.prewarm is not None:
        body["prewarm"] = want.prewarm
    if want.wait_timeout and (want.prewarm or (before and "prewarm" in before)):
        after["prewarm"] = want.prewarm or 0
    # The login is no part of the plan: it does not change what is built, and a plan file must not contain it.
    login_field = {LOGIN_KEY: want.login} if want.login else {}
    archives_field = {ARCHIVES_KEY: have.dockerfile.missing_archives} if have.dockerfile else {}
    request = {"body": body, "wait": want.wait_timeout, **login_field, **archives_field}
    return [Action("build", (Change(name, before, after, TEMPLATE),), request)]


def _plan_pull(
    want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any] | None
) -> list[Action]:
    """Plan to pull a template, unless it was pulled from the same artifact. It can outlive its artifact."""
    if have.artifact_failure is not None:
        raise have.artifact_failure
    artifact = have.artifact
    if current_shape is not None and current_shape["status"] == "building":
        raise _refusals.create_template_not_ready_error(name)
    origin = have.origins.get(name, "")
    if current_shape is not None and origin and (artifact is None or artifact.snapshot_id == origin):
        return plan_prewarm(name, current_shape, make_view(current_shape), want.prewarm, TEMPLATE)
    if artifact is None:
        # Plan sessions push nothing.
        with failures_conditional(f"only if no earlier task of the run pushes {want.artifact}"):
            raise Failure(f"the artifact {want.artifact} does not exist: correct artifact, or push it", "not_found")
    if artifact.kind != "template":
        raise Failure(f"{want.artifact} contains a snapshot: use sandbox_snapshot with pull_from", "invalid")
    before = None if current_shape is None else make_view(current_shape)
    after = {"name": name, "status": "ready", "recipe": {}}
    request = {
        "reference": want.artifact,
        "digest": artifact.digest,
        "name": name,
        "trust": list(want.trust),
        "data_bytes": artifact.data_bytes,
    }
    actions = [Action("pull", (Change(name, before, after, TEMPLATE),), request)]
    if want.prewarm:
        prewarm_request = {"path": f"/snapshots/{quote_segment(name)}/prewarm", "count": want.prewarm}
        prewarm_change = Change(name, after, {**after, "prewarm": want.prewarm}, TEMPLATE)
        actions.append(Action("prewarm", (prewarm_change,), prewarm_request))
    return actions


def _is_up_to_date(want: DesiredState, recipe: Mapping[str, Any], current_shape: Mapping[str, Any]) -> bool:
    """Return whether the template was built from the recipe and is not outdated.

    If the task does not wait, a template that is still being built counts as up to date. A template whose state the
    gateway cannot determine counts as not outdated.
    """
    accepted_statuses = ("ready",) if want.wait_timeout else ("ready", "building")
    return (
        current_shape["status"] in accepted_statuses
        and _has_same_recipe(recipe, current_shape)
        and not (want.rebuild_outdated and current_shape["outdated"])
    )


def _has_same_recipe(recipe: Mapping[str, Any], current_shape: Mapping[str, Any]) -> bool:
    return all(current_shape["recipe"].get(option) == value for option, value in recipe.items())


def _plan_removal(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> Action:
    check_unused("template", name, have.users.get(current_shape["id"]))
    request = {"path": f"/templates/{quote_segment(current_shape['id'])}", "when_unused": want.when_unused}
    return Action("remove", (Change(name, make_view(current_shape), None, TEMPLATE),), request)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure, whose message quotes the end of the log if a build failed."""
    request = action.request
    if action.verb == "build":
        for archive in request.get(ARCHIVES_KEY, ()):
            _upload(client, archive)
        template = client.post("/templates", {**request["body"], **request.get(LOGIN_KEY, {})})
        client.started_builds[action.changes[0].name] = template["templateID"]
        if template.get("buildStatus") != "ready" and request["wait"]:
            _wait_for_build(client, action.changes[0].name, template, request["wait"])
        elif template.get("buildStatus") != "ready" and client.is_planning:
            # The build finishes at once. Without this, the next task could find it unfinished.
            with contextlib.suppress(Failure):
                _wait_for_build(client, action.changes[0].name, template, client.timeout)
    elif action.verb == "pull":
        # If the tag is moved meanwhile, pull what was planned.
        reference = replace_tag(request["reference"], request["digest"])
        pull(client, "/templates", reference, request["name"], request["trust"])
    elif action.verb == "prewarm":
        client.post(request["path"], {"count": request["count"]})
    elif action.verb == "remove":
        client.delete(request["path"], when="unused" if request["when_unused"] else "")
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def _upload(client: Client, archive: Archive) -> None:
    """Upload the files of a COPY instruction. In a plan session, only announce them. Raises Failure."""
    path = f"/build-files/{archive.digest}"
    if archive.digest in client.uploaded_digests:
        return
    try:
        if client.is_planning:
            client.put_file(path, lambda: (), 0)
        else:
            client.put_file(path, archive.read_pieces, archive.size)
    except ContextError as error:
        raise Failure(str(error)) from None
    client.uploaded_digests.add(archive.digest)


def _wait_for_build(client: Client, name: str, template: Mapping[str, Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    path = f"/templates/{quote_segment(template['templateID'])}/builds/{quote_segment(template['buildID'])}/status"
    delay, max_delay = POLL_SECONDS
    lines: list[str] = []
    offset = 0
    while True:
        build = client.get(path, logsOffset=offset)
        new_lines = build.get("logs") or []
        offset += len(new_lines)
        lines = [*lines, *new_lines][-LOG_TAIL_LINE_COUNT:]
        if build["status"] == "ready":
            return
        if build["status"] == "error":
            # Older gateways return the reason as text instead of errorMessage.
            reason = build.get("errorMessage") or build.get("reason") or "the gateway reported no reason"
            message = f"the build of template {name!r} failed: {replace_fields(reason)}"
            raise Failure(_append_log(message, lines), "backend_failed")
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            message = (
                f"template {name!r} is still being built after {seconds:g} s: run the task again to continue waiting"
            )
            raise Failure(_append_log(message, lines), "timeout", blockers=[template["buildID"]])
        time.sleep(min(delay, remaining_seconds))
        delay = min(delay * 1.5, max_delay)


def _append_log(message: str, lines: list[str]) -> str:
    return "\n".join([message, "The end of its log:", *lines]) if lines else message


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    return {PLURAL: want.names}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    return have.resources
