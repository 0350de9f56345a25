"""The hints that the command line prints depend on the kind and the details of an error, never on its message."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_gateway.cli.failure import ExitCode, create_failure_from_response


def get_hint(kind: str, status: int, details: dict[str, Any] | None = None, blockers: tuple[str, ...] = ()) -> str:
    body: dict[str, Any] = {"kind": kind, "message": "any message", "blockers": list(blockers)}
    return create_failure_from_response(status, body if details is None else {**body, "details": details}).hint


def get_in_use_hint(resource: str, *kinds: str, overrides: tuple[str, ...] = ()) -> str:
    users = [{"kind": kind, "id": f"{number:012}", "name": f"u{number}"} for number, kind in enumerate(kinds)]
    ids = tuple(user["id"] for user in users)
    return get_hint("in_use", 409, {"resource": resource, "users": users, "overrides": [*overrides]}, ids)


@pytest.mark.parametrize(
    ("details", "command"),
    [
        ({"resource": "sandbox", "parent": ""}, "list"),
        ({"resource": "template", "parent": ""}, "template list"),
        ({"resource": "snapshot", "parent": ""}, "snapshot list"),
        ({"resource": "volume", "parent": ""}, "volume list"),
        ({"resource": "volume_snapshot", "parent": "data"}, "volume snapshots data"),
        ({"resource": "volume_snapshot", "parent": ""}, "volume list"),
        ({"resource": "mount", "parent": "one"}, "show one"),
        ({"resource": "build", "parent": "0123"}, "list"),
        ({"resource": "of a newer gateway", "parent": "x"}, "list"),
        (None, "list"),
    ],
)
def test_a_not_found_hint_names_the_command_that_lists_objects(details: dict[str, Any] | None, command: str) -> None:
    assert get_hint("not_found", 404, details) == f"`sandboxctl {command}` lists the existing ones"


def test_a_snapshot_in_use_by_sandboxes_suggests_killing_them() -> None:
    hint = get_in_use_hint("snapshot", "sandbox", "sandbox", overrides=("when=unused",))
    assert "sandboxctl kill 000000000000 000000000001" in hint and "--when-unused" in hint


def test_a_snapshot_in_use_by_a_volume_clone_suggests_deleting_the_volume() -> None:
    assert "sandboxctl volume delete VOLUME" in get_in_use_hint(
        "snapshot", "sandbox", "clone", overrides=("when=unused",)
    )


@pytest.mark.parametrize(
    ("kinds", "overrides", "expected_text"),
    [
        (("mount",), (), "volume detach"),
        (("mount",), ("force",), "--force rolls it back anyway"),
        (("sandbox_snapshot",), (), "snapshot delete SNAPSHOT"),
        (("volume_snapshot",), ("withSnapshots",), "--with-snapshots"),
        (("clone",), (), "removes its clone"),
    ],
)
def test_each_kind_of_volume_user_has_a_hint(
    kinds: tuple[str, ...], overrides: tuple[str, ...], expected_text: str
) -> None:
    assert expected_text in get_in_use_hint("volume", *kinds, overrides=overrides)
    assert get_in_use_hint("volume", *kinds, overrides=overrides).count(";") == len(kinds) + len(overrides) - 1 - (
        "withSnapshots" in overrides
    )


@pytest.mark.parametrize("resource", ["volume", "volume_snapshot", "snapshot", "template"])
def test_a_resource_in_use_by_a_request_suggests_a_retry(resource: str) -> None:
    assert get_in_use_hint(resource) == "try again in a moment"


@pytest.mark.parametrize("resource", ["volume", "snapshot"])
def test_users_that_only_the_host_knows_get_no_hint(resource: str) -> None:
    assert get_in_use_hint(resource, "zfs_clone", "hold") == ""


def test_an_error_without_details_suggests_killing_the_blockers() -> None:
    assert "sandboxctl kill 0123" in get_hint("in_use", 409, None, ("0123",))


def test_exit_codes_follow_the_status_and_the_kind() -> None:
    assert create_failure_from_response(409, {"kind": "in_use", "message": "x"}).code is ExitCode.CONFLICT
    assert create_failure_from_response(400, {"kind": "unsupported", "message": "x"}).code is ExitCode.FAILED
    assert create_failure_from_response(404, None).code is ExitCode.UNREACHABLE
