# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The plan session of a check-mode run (`ansible-playbook --check`), which all plugins of the run share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ansible import constants as C
from ansible import context
from ansible.errors import AnsibleActionSkip, AnsibleConnectionFailure
from ansible.utils.unsafe_proxy import wrap_var
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client, quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, make_printable
from ansible_collections.grove.sandbox.plugins.module_utils._plan import is_planned_id

_MARKER_NAME = "grove.sandbox-plan"
_SESSION_NAME = "grove.sandbox-session"
_SESSION_PATTERN = re.compile(r"/(plans|applied-runs)/[0-9a-f]{32}")
_OPENED_NAME = "grove.sandbox-opened"
_END_TIMEOUT_SECONDS = 5


class PlannedMachineSkip(AnsibleActionSkip, AnsibleConnectionFailure):
    """Skips a task whose machine does not run yet: only the planned changes, or the task itself, would start it.

    It is also a connection failure, because some action plugins (such as `fetch`) re-raise only connection failures.
    """


def is_check_run() -> bool:
    return bool(context.CLIARGS.get("check"))


def make_run_name() -> str:
    """Return a name that all tasks of this run share and no other run has.

    The main process creates its temporary directory before it forks workers, so all of them know its unique name.
    """
    return hashlib.sha256(f"{platform.node()} {C.DEFAULT_LOCAL_TMP}".encode()).hexdigest()


def record_session() -> None:
    """Record that a task of this run uses a plan session, for the other processes of this run.

    The file is removed with the run's temporary directory.
    """
    _make_marker_path().touch(mode=0o600)


def has_session() -> bool:
    """Return whether a task of this check-mode run has used a plan session, so that there can be predicted sandboxes.

    Gateways keep few sessions, so runs that do not need one must not open one.
    """
    return is_check_run() and _make_marker_path().exists()


def _make_marker_path() -> Path:
    return Path(C.DEFAULT_LOCAL_TMP) / _MARKER_NAME


def record_opening(key: Any, opened_at: Any) -> None:
    """Record when a plan session was opened, for ``read_openings``. Only the first record of a session counts.

    ``key``, ``opened_at``: ``Client.plan_key`` and ``Client.plan_opened_at``. Does nothing if they are not strings,
    because a managed host may have made them up. The file is removed with the run's temporary directory.
    """
    if not isinstance(key, str) or not isinstance(opened_at, str) or key in read_openings():
        return
    # Other processes of the run write to the file at the same time.
    descriptor = os.open(_make_openings_path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{json.dumps([key, opened_at])}\n".encode())
    finally:
        os.close(descriptor)


def read_openings() -> dict[str, str]:
    """Return when the plan sessions of this run were opened; see ``Client.enter_plan``."""
    openings: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in _make_openings_path().read_text(encoding="utf-8").splitlines():
            key, opened_at = json.loads(line)
            openings.setdefault(key, opened_at)
    return openings


def _make_openings_path() -> Path:
    return Path(C.DEFAULT_LOCAL_TMP) / _OPENED_NAME


def enter_session(client: Client) -> bool:
    """Carry out all further requests of ``client`` in the plan session of this run. Raises Failure.

    Returns False if the gateway has no session for this run and this key.
    """
    if not has_session():
        return False
    try:
        if not client.enter_plan(make_run_name(), read_openings(), wait=False):
            return False
    except Failure as failure:
        # This key cannot have another session, so no task of this run has one.
        if failure.kind == "busy":
            return False
        raise
    record_open_session(client.make_session_reference())
    record_opening(client.plan_key, client.plan_opened_at)
    return True


def record_open_session(session: dict[str, Any]) -> None:
    """Record a session for ``end_sessions``. ``session``: see ``Client.make_session_reference``.

    Does nothing if the session's id is invalid, because a managed host may have made it up.
    The file contains the API key. Like the modules that Ansible writes, only its owner can read it, and it is removed
    with the run's temporary directory.
    """
    if not _SESSION_PATTERN.fullmatch(session["session"]):
        return
    text = json.dumps(session, sort_keys=True)
    path = Path(C.DEFAULT_LOCAL_TMP) / f"{_SESSION_NAME}-{hashlib.sha256(text.encode()).hexdigest()}.json"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def record_run_session(gateway: dict[str, Any]) -> None:
    """Record the session of this check-mode run in ``gateway`` for ``end_sessions``, although no task has reported it.

    Opens the session if no task has done so yet. Does nothing if this host cannot reach the gateway.
    ``gateway``: see ``Client.make_session_reference``, without a session.
    """
    with contextlib.suppress(Failure):
        with _gateway_connected(gateway) as client:
            client.enter_plan(make_run_name(), wait=False)
        record_open_session({**gateway, "session": client.session_path})
        record_opening(client.plan_key, client.plan_opened_at)


@contextlib.contextmanager
def _gateway_connected(gateway: dict[str, Any]) -> Iterator[Client]:
    """Yield a client for a gateway; see ``record_run_session``. Raises Failure."""
    client = Client(
        gateway["url"], gateway["token"], gateway["ca_path"], gateway["validate_certs"], _END_TIMEOUT_SECONDS
    )
    try:
        yield client
    finally:
        client.close()


def end_sessions() -> list[str]:
    """End the recorded sessions and applied runs of this run. Returns a message for each one that was not ended."""
    messages = []
    for path in sorted(Path(C.DEFAULT_LOCAL_TMP).glob(f"{_SESSION_NAME}-*.json")):
        try:
            session = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # the process that wrote it was killed
            continue
        path.unlink()
        try:
            with _gateway_connected(session) as client:
                client.delete(session["session"])
        except Failure as failure:
            messages.append(
                f"the session {session['session']} was not ended, so it ends when it has been idle for some time: "
                f"{failure.message}"
            )
    return messages


def require_machine(client: Client, sandbox: str, *, check_mode: bool) -> None:
    """Raise an exception if a task of a check-mode run must not be sent to ``sandbox``, an id or a name.

    ``check_mode`` says whether the task itself is in check mode. Other tasks act on the real sandbox, so only its
    existence matters to them. Raises PlannedMachineSkip if the task needs a machine that only the run starts, or if the
    gateway would resume the sandbox for it, and Failure if a run could not reach the sandbox either. Enters the plan
    session of the run, if there is one.
    """
    path = f"/sandboxes/{quote_segment(sandbox)}"
    # To determine whether a real sandbox has diverged, the gateway would make its guest write to its disk.
    real_sandbox = None if is_planned_id(sandbox) else client.find(path, diverged=False)
    if real_sandbox is not None and not check_mode:
        return
    planned_sandbox = client.find(path, diverged=False) if enter_session(client) else None
    if planned_sandbox is not None:
        _check_machine(planned_sandbox, real_sandbox, client)
    elif real_sandbox is None and has_session():
        raise Failure(
            f"sandbox {sandbox} not found, neither at the gateway {client.address.url} nor in a plan session of the "
            "connection's key: use the same gateway and the same key for the connection as for the tasks that plan the "
            "sandbox"
        )
    elif real_sandbox is not None and client.is_planning and real_sandbox["createdAt"] <= client.plan_opened_at:
        raise Failure(f"the plan removes sandbox {sandbox}, so a run could not reach it")
    if real_sandbox is not None and real_sandbox["state"] == "paused" and real_sandbox["lifecycle"]["autoResume"]:
        _skip_task(
            f"sandbox {real_sandbox['name'] or real_sandbox['sandboxID']} is paused, and this task would resume it"
        )


def _check_machine(planned_sandbox: dict[str, Any], real_sandbox: dict[str, Any] | None, client: Client) -> None:
    """Compare a sandbox in the plan session of ``client`` with the real one. Raises PlannedMachineSkip or Failure."""
    name = planned_sandbox["name"] or planned_sandbox["sandboxID"]
    if planned_sandbox["state"] == "paused":
        if real_sandbox is not None and real_sandbox["state"] == "paused":
            return
        if not planned_sandbox["lifecycle"]["autoResume"]:
            raise Failure(f"the plan pauses sandbox {name}, so a run could not reach it")
        reason = f"the plan pauses sandbox {name}, and this task would resume it"
    elif is_planned_id(planned_sandbox["sandboxID"]):
        reason = f"sandbox {name} exists only in the plan"
    elif planned_sandbox["startedAt"] > client.plan_opened_at:
        reason = f"the plan starts a new machine for sandbox {name}"
    elif real_sandbox is not None and _get_mounts(planned_sandbox) != _get_mounts(real_sandbox):
        reason = f"the plan changes the volumes of sandbox {name}"
    elif real_sandbox is not None and planned_sandbox["network"] != real_sandbox["network"]:
        reason = f"the plan changes the network of sandbox {name}"
    elif volume := _find_changed_volume(planned_sandbox, client):
        reason = f"the plan changes the contents or the size of volume {volume}, which sandbox {name} mounts"
    else:
        return
    _skip_task(reason)


def _find_changed_volume(planned_sandbox: dict[str, Any], client: Client) -> str:
    """Return the name of a mounted volume that the plan rolls back, enlarges or creates, or "". Raises Failure.

    Sends no request if the sandbox mounts no volumes.
    """
    for name in sorted({mount["name"] for mount in planned_sandbox["volumeMounts"]}):
        volume = client.find(f"/volumes/{quote_segment(name)}")
        # The generation in a session does not count its own changes. Older gateways have no ``ownChanges``.
        if volume is not None and (volume["createdAt"] > client.plan_opened_at or volume.get("ownChanges")):
            return name
    return ""


def _skip_task(reason: str) -> NoReturn:
    raise PlannedMachineSkip(wrap_var(make_printable(f"{reason}: this task is skipped in check mode")))


def _get_mounts(sandbox: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(sandbox["volumeMounts"], key=lambda mount: str(mount["path"]))
