"""Test `sandboxctl volume`, and the volume options of other commands."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sandbox_gateway.cli import formats
from sandbox_gateway.cli.failure import Failure, create_failure_from_response
from tests.cli.running import Run, check_success
from tests.support.memory_gateway import READ_KEY, MemoryGateway


def test_a_volume_is_created_mounted_rolled_back_and_deleted(run: Run) -> None:
    assert re.search(r"data +1 GiB +0 B +- +- +\d+ s", check_success(run("volume", "create", "data")).out)
    check_success(run("create", "base", "--name", "one", "--volume", "data:/srv/data"))
    assert re.search(r"data +2 GiB +0 B +one", check_success(run("volume", "grow", "data", "2G")).out)
    snapshot = check_success(run("volume", "snapshot", "data", "--name", "monday", "--json")).json
    assert re.search(
        rf"monday +{snapshot['snapshotID']} +2 GiB +-", check_success(run("volume", "snapshots", "data")).out
    )
    copy_output = check_success(run("volume", "create", "copy", "--from", "data@monday", "--size", "3G")).out
    assert re.search(rf"copy +3 GiB +0 B +- +{snapshot['snapshotID']}", copy_output)
    outcome = check_success(run("volume", "attach", "one", "copy:/srv/copy:ro"))
    assert "mounted in one: copy:/srv/copy:ro" in outcome.out
    check_success(run("volume", "detach", "one", "copy", "data"))
    assert "data was rolled back to monday" in check_success(run("volume", "rollback", "data", "monday")).out
    check_success(run("volume", "delete", "copy", "data@monday", "data"))
    assert check_success(run("volume", "list", "--json")).json == []


def test_volume_tables_are_printed_by_default(run: Run) -> None:
    outcome = check_success(run("volume", "list"))
    assert outcome.out == "" and "sandboxctl volume create" in outcome.err
    check_success(run("volume", "create", "data"))
    assert "sandboxctl volume snapshot data" in check_success(run("volume", "snapshots", "data")).err
    for name in ("a", "b", "c"):
        check_success(run("create", "base", "--name", name, "--volume", "data:/srv/data:ro"))
    table = check_success(run("volume", "list")).out
    assert re.search(r"^NAME +SIZE +USED +MOUNTED BY", table) and "a, b, c" in table
    check_success(run("create", "base", "--name", "d", "--volume", "data:/srv/data"))
    assert "4 sandboxes" in check_success(run("volume", "list")).out
    check_success(run("pause", "a"))
    details = check_success(run("volume", "show", "data")).out
    assert re.search(r"a \([0-9a-f]{12}, paused\) at /srv/data, read-only *\n", details)
    assert re.search(r"d \([0-9a-f]{12}, running\) at /srv/data *\n", details)
    assert re.search(r"sizeMB +1 GiB", details) and "token" not in details
    assert "data:/srv/data:ro" in check_success(run("show", "a")).out


def test_volumes_are_printed_as_json(run: Run) -> None:
    volume = check_success(run("volume", "create", "data", "--size", "128M", "--json")).json
    assert volume["sizeMB"] == 128 and volume["token"]
    check_success(run("create", "base", "--name", "one"))
    mount = {"name": "data", "path": "/srv/a:ro/b", "readOnly": False}
    assert check_success(run("volume", "attach", "one", "data:/srv/a:ro/b", "--json")).json == mount
    assert check_success(run("--json", "volume", "show", "data")).json["mounts"][0]["path"] == "/srv/a:ro/b"
    assert check_success(run("volume", "snapshot", "data", "--json")).json["volumeID"] == "data"
    assert len(check_success(run("volume", "snapshots", "data", "--json")).json) == 1
    assert check_success(run("volume", "grow", "data", "1G", "--json")).json["sizeMB"] == 1024


def test_volumes_are_captured_and_forked(run: Run) -> None:
    for name in ("data", "lib"):
        check_success(run("volume", "create", name))
    check_success(run("create", "base", "--name", "one", "--volume", "data:/srv/data", "--volume", "lib:/srv/lib:ro"))
    snapshot = check_success(run("snapshot", "create", "one", "--name", "s1", "--volumes", "data,lib", "--json")).json
    assert [part["name"] for part in snapshot["volumes"]] == ["data", "lib"]
    assert f"data@{snapshot['volumes'][0]['snapshotID']}" in check_success(run("snapshot", "show", "s1")).out

    def fork_and_list_mounts(*args: str) -> Any:
        sandboxes = check_success(run(*args, "--json")).json["sandboxes"]
        return [formats.format_mount(mount) for mount in sandboxes[0]["volumeMounts"]]

    captured_mounts = ["data:/srv/data", "lib:/srv/lib:ro"]
    assert fork_and_list_mounts("snapshot", "fork", "s1") == fork_and_list_mounts("clone", "one") == captured_mounts
    assert (
        fork_and_list_mounts("snapshot", "fork", "s1", "--no-volumes")
        == fork_and_list_mounts("clone", "one", "--no-volumes")
        == []
    )
    assert fork_and_list_mounts("clone", "one", "--volume", "lib:/opt/lib") == ["lib:/opt/lib"]
    cloned_mounts = fork_and_list_mounts(
        "snapshot", "fork", "s1", "--names", "mine", "--volume", "data:/srv/data:ro:clone"
    )
    assert cloned_mounts == ["mine-data:/srv/data:ro"]
    assert fork_and_list_mounts("clone", "one", "--names", "twin", "--volume", "data:/srv/data:clone") == [
        "twin-data:/srv/data"
    ]
    sandbox = check_success(run("create", "s1", "--name", "plain", "--no-volumes", "--json")).json
    assert sandbox["volumeMounts"] == []


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("volume", "show", "nothing"), 3, "`sandboxctl volume list` lists"),
        (("volume", "create", "copy", "--from", "data@never"), 3, "`sandboxctl volume snapshots data` lists"),
        (("volume", "rollback", "data", "never"), 3, "`sandboxctl volume snapshots data` lists"),
        (("volume", "detach", "two", "data"), 3, "`sandboxctl show two` lists"),
        (("volume", "detach", "one", "none", "data", "nobody"), 3, "'nobody' not found"),
        (("create", "base", "--volume", "nothing:/srv/x"), 3, "`sandboxctl volume list` lists"),
        (("volume", "create", "data"), 4, "choose a different name"),
        (("volume", "attach", "one", "data:/srv/other"), 4, "already"),
        (("volume", "delete", "data"), 4, "volume detach SANDBOX VOLUME` unmounts it; --with-snapshots also removes"),
        (("volume", "rollback", "data", "monday"), 4, "--force rolls it back anyway"),
        (("volume", "delete", "held", "--with-snapshots"), 4, "`sandboxctl snapshot delete SNAPSHOT` removes"),
        (("volume", "grow", "data", "512M"), 2, "shrink"),
        (("volume", "grow", "data", "much"), 2, "not a size"),
        (("volume", "create", "tiny", "--size", "1M"), 2, "--size: "),
        (("volume", "attach", "two", "data"), 2, "write NAME:/PATH"),
        (("volume", "attach", "two", "data:/srv/data:clone"), 2, "create a volume from a snapshot first"),
        (("create", "base", "--volume", "data:relative"), 2, "write NAME:/PATH"),
        (("create", "base", "--volume", "data:/srv/data:clone"), 2, "does not include volume data"),
        (("create", "base", "--volume", "data:/proc"), 2, "/proc"),
        (("clone", "one", "--volume", "data:/x", "--no-volumes"), 2, "omit one of them"),
    ],
)
def test_failures_have_a_message_and_a_hint(run: Run, args: tuple[str, ...], code: int, words: str) -> None:
    for name in ("data", "held"):
        check_success(run("volume", "create", name))
    check_success(run("create", "base", "--name", "one", "--volume", "data:/srv/data", "--volume", "held:/srv/held"))
    check_success(run("create", "base", "--name", "two"))
    check_success(run("volume", "snapshot", "data", "--name", "monday"))
    check_success(run("snapshot", "create", "one", "--volumes", "held"))
    check_success(run("volume", "detach", "one", "held"))
    outcome = run(*args)
    assert outcome.code == code, outcome.err
    assert words in outcome.err and outcome.out == ""
    assert outcome.err.startswith("sandboxctl: ") and "Traceback" not in outcome.err


def test_the_hint_for_a_cloned_volume_is_to_delete_it() -> None:
    message = "snapshot '41f4b8565126' is in use by 1 cloned volume (copy). Delete them first, or pass 'when=unused'"
    users = [{"kind": "clone", "id": "e2d0ad307996", "name": "copy"}]
    details = {"resource": "snapshot", "users": users, "overrides": ["when=unused"]}
    body = {"kind": "in_use", "message": message, "blockers": ["e2d0ad307996"], "details": details}
    failure = create_failure_from_response(409, body)
    assert failure.code == 4 and "sandboxctl volume delete VOLUME" in failure.hint


def test_force_and_with_snapshots_override_refusals(run: Run) -> None:
    check_success(run("volume", "create", "data"))
    check_success(run("create", "base", "--name", "one", "--volume", "data:/srv/data"))
    check_success(run("volume", "snapshot", "data", "--name", "monday"))
    check_success(run("volume", "rollback", "data", "monday", "--force"))
    check_success(run("volume", "detach", "one", "data"))
    check_success(run("volume", "delete", "data", "--with-snapshots"))


def test_a_read_only_key_cannot_delete_a_volume(memory_gateway: MemoryGateway, run: Run) -> None:
    check_success(run("volume", "create", "data"))
    assert run("volume", "show", "data", url=memory_gateway.url, token=READ_KEY).code == 0
    outcome = run("volume", "delete", "data", url=memory_gateway.url, token=READ_KEY)
    assert outcome.code == 5 and "wider scope" in outcome.err


@pytest.mark.parametrize(
    ("text", "path", "flags"),
    [
        ("data:/srv", "/srv", ""),
        ("data:/srv:ro", "/srv", "ro"),
        ("data:/srv:clone", "/srv", "clone"),
        ("data:/srv:ro:clone", "/srv", "ro clone"),
        ("data:/srv:clone:ro", "/srv", "ro clone"),
        ("data:/srv:rw", "/srv:rw", ""),
        ("data:/ro", "/ro", ""),
        ("data:/a:ro/b", "/a:ro/b", ""),
    ],
)
def test_mounts_are_parsed(text: str, path: str, flags: str) -> None:
    expected_mount = {"name": "data", "path": path, "readOnly": "ro" in flags.split(), "clone": "clone" in flags}
    assert formats.parse_mount(text) == expected_mount


@pytest.mark.parametrize("text", ["", "data", ":/srv", "data:", "data:srv", "data::ro", "/srv:data", "ro"])
def test_invalid_mounts_are_refused(text: str) -> None:
    with pytest.raises(Failure, match="is not a volume mount"):
        formats.parse_mount(text)
