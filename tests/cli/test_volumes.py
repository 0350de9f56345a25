"""`sandboxctl volume`, and the volume options of other commands."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sandbox_gateway.cli import formats
from sandbox_gateway.cli.failure import Failure, failure_from_answer
from tests.api.served import READ_KEY, Served
from tests.cli.running import Run, done


def test_the_life_of_a_volume(run: Run) -> None:
    assert re.search(r"data +1 GiB +0 B +- +- +\d+ s", done(run("volume", "create", "data")).out)
    done(run("create", "base", "--name", "one", "--volume", "data:/srv/data"))
    assert re.search(r"data +2 GiB +0 B +one", done(run("volume", "grow", "data", "2G")).out)
    taken = done(run("volume", "snapshot", "data", "--name", "monday", "--json")).json
    assert re.search(rf"monday +{taken['snapshotID']} +2 GiB +-", done(run("volume", "snapshots", "data")).out)
    copy = done(run("volume", "create", "copy", "--from", "data@monday", "--size", "3G")).out
    assert re.search(rf"copy +3 GiB +0 B +- +{taken['snapshotID']}", copy)
    assert "one has copy:/srv/copy:ro" in done(run("volume", "attach", "one", "copy:/srv/copy:ro")).out
    done(run("volume", "detach", "one", "copy", "data"))
    assert "data is back at monday" in done(run("volume", "rollback", "data", "monday")).out
    done(run("volume", "delete", "copy", "data@monday", "data"))
    assert done(run("volume", "list", "--json")).json == []


def test_what_people_are_shown(run: Run) -> None:
    nothing = done(run("volume", "list"))
    assert nothing.out == "" and "sandboxctl volume create" in nothing.err
    done(run("volume", "create", "data"))
    assert "sandboxctl volume snapshot data" in done(run("volume", "snapshots", "data")).err
    for name in ("a", "b", "c"):
        done(run("create", "base", "--name", name, "--volume", "data:/srv/data:ro"))
    listed = done(run("volume", "list")).out
    assert re.search(r"^NAME +SIZE +USED +MOUNTED BY", listed) and "a, b, c" in listed
    done(run("create", "base", "--name", "d", "--volume", "data:/srv/data"))
    assert "4 sandboxes" in done(run("volume", "list")).out
    done(run("pause", "a"))
    shown = done(run("volume", "show", "data")).out
    assert re.search(r"a \([0-9a-f]{12}, paused\) at /srv/data, read-only *\n", shown)
    assert re.search(r"d \([0-9a-f]{12}, running\) at /srv/data *\n", shown)
    assert re.search(r"sizeMB +1 GiB", shown) and "token" not in shown
    assert "data:/srv/data:ro" in done(run("show", "a")).out


def test_json_for_programs(run: Run) -> None:
    made = done(run("volume", "create", "data", "--size", "128M", "--json")).json
    assert made["sizeMB"] == 128 and made["token"]
    done(run("create", "base", "--name", "one"))
    mount = {"name": "data", "path": "/srv/a:ro/b", "readOnly": False}
    assert done(run("volume", "attach", "one", "data:/srv/a:ro/b", "--json")).json == mount
    assert done(run("--json", "volume", "show", "data")).json["mounts"][0]["path"] == "/srv/a:ro/b"
    assert done(run("volume", "snapshot", "data", "--json")).json["volumeID"] == "data"
    assert len(done(run("volume", "snapshots", "data", "--json")).json) == 1
    assert done(run("volume", "grow", "data", "1G", "--json")).json["sizeMB"] == 1024


def test_captured_and_forked_along(run: Run) -> None:
    for name in ("data", "lib"):
        done(run("volume", "create", name))
    done(run("create", "base", "--name", "one", "--volume", "data:/srv/data", "--volume", "lib:/srv/lib:ro"))
    taken = done(run("snapshot", "create", "one", "--name", "s1", "--volumes", "data,lib", "--json")).json
    assert [part["name"] for part in taken["volumes"]] == ["data", "lib"]
    assert f"data@{taken['volumes'][0]['snapshotID']}" in done(run("snapshot", "show", "s1")).out

    def mounts(*args: str) -> Any:
        made = done(run(*args, "--json")).json["sandboxes"]
        return [formats.format_mount(mount) for mount in made[0]["volumeMounts"]]

    as_it_was = ["data:/srv/data", "lib:/srv/lib:ro"]
    assert mounts("snapshot", "fork", "s1") == mounts("clone", "one") == as_it_was
    assert mounts("snapshot", "fork", "s1", "--no-volumes") == mounts("clone", "one", "--no-volumes") == []
    assert mounts("clone", "one", "--volume", "lib:/opt/lib") == ["lib:/opt/lib"]
    own = mounts("snapshot", "fork", "s1", "--names", "mine", "--volume", "data:/srv/data:ro:clone")
    assert own == ["mine-data:/srv/data:ro"]
    assert mounts("clone", "one", "--names", "twin", "--volume", "data:/srv/data:clone") == ["twin-data:/srv/data"]
    plain = done(run("create", "s1", "--name", "plain", "--no-volumes", "--json")).json
    assert plain["volumeMounts"] == []


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("volume", "show", "nothing"), 3, "`sandboxctl volume list` shows"),
        (("volume", "create", "copy", "--from", "data@never"), 3, "`sandboxctl volume snapshots data` shows"),
        (("volume", "rollback", "data", "never"), 3, "`sandboxctl volume snapshots data` shows"),
        (("volume", "detach", "two", "data"), 3, "`sandboxctl show two` shows"),
        (("volume", "detach", "one", "none", "data", "nobody"), 3, "'nobody' not found"),
        (("create", "base", "--volume", "nothing:/srv/x"), 3, "`sandboxctl volume list` shows"),
        (("volume", "create", "data"), 4, "choose another name"),
        (("volume", "attach", "one", "data:/srv/other"), 4, "already"),
        (("volume", "delete", "data"), 4, "volume detach SANDBOX VOLUME` unmounts it; --with-snapshots removes"),
        (("volume", "rollback", "data", "monday"), 4, "--force does it anyway"),
        (("volume", "delete", "held", "--with-snapshots"), 4, "`sandboxctl snapshot delete SNAPSHOT` removes"),
        (("volume", "grow", "data", "512M"), 2, "shrink"),
        (("volume", "grow", "data", "much"), 2, "not a size"),
        (("volume", "create", "tiny", "--size", "1M"), 2, "sizeMB"),
        (("volume", "attach", "two", "data"), 2, "write NAME:/PATH"),
        (("volume", "attach", "two", "data:/srv/data:clone"), 2, "make one from a snapshot of it"),
        (("create", "base", "--volume", "data:relative"), 2, "write NAME:/PATH"),
        (("create", "base", "--volume", "data:/srv/data:clone"), 2, "holds no capture of volume data"),
        (("create", "base", "--volume", "data:/proc"), 2, "/proc"),
        (("clone", "one", "--volume", "data:/x", "--no-volumes"), 2, "leave one of them out"),
    ],
)
def test_what_goes_wrong(run: Run, args: tuple[str, ...], code: int, sentence: str) -> None:
    for name in ("data", "held"):
        done(run("volume", "create", name))
    done(run("create", "base", "--name", "one", "--volume", "data:/srv/data", "--volume", "held:/srv/held"))
    done(run("create", "base", "--name", "two"))
    done(run("volume", "snapshot", "data", "--name", "monday"))
    done(run("snapshot", "create", "one", "--volumes", "held"))
    done(run("volume", "detach", "one", "held"))
    outcome = run(*args)
    assert outcome.code == code, outcome.err
    assert sentence in outcome.err and outcome.out == ""
    assert outcome.err.startswith("sandboxctl: ") and "Traceback" not in outcome.err


def test_a_volume_in_a_snapshots_way_is_deleted_and_not_killed() -> None:
    message = "snapshot '41f4b8565126' is in use by 1 cloned volume (copy). Delete them first, or pass when=unused"
    users = [{"kind": "clone", "id": "e2d0ad307996", "name": "copy"}]
    details = {"resource": "snapshot", "users": users, "overrides": ["when=unused"]}
    body = {"kind": "in_use", "message": message, "blockers": ["e2d0ad307996"], "details": details}
    failure = failure_from_answer(409, body)
    assert failure.code == 4 and "sandboxctl volume delete VOLUME" in failure.hint


def test_force_and_snapshots_along(run: Run) -> None:
    done(run("volume", "create", "data"))
    done(run("create", "base", "--name", "one", "--volume", "data:/srv/data"))
    done(run("volume", "snapshot", "data", "--name", "monday"))
    done(run("volume", "rollback", "data", "monday", "--force"))
    done(run("volume", "detach", "one", "data"))
    done(run("volume", "delete", "data", "--with-snapshots"))


def test_a_key_that_reads(served: Served, run: Run) -> None:
    done(run("volume", "create", "data"))
    assert run("volume", "show", "data", url=served.url, token=READ_KEY).code == 0
    forbidden = run("volume", "delete", "data", url=served.url, token=READ_KEY)
    assert forbidden.code == 5 and "wider scope" in forbidden.err


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
def test_mounts_written(text: str, path: str, flags: str) -> None:
    wanted = {"name": "data", "path": path, "readOnly": "ro" in flags.split(), "clone": "clone" in flags}
    assert formats.parse_mount(text) == wanted


@pytest.mark.parametrize("text", ["", "data", ":/srv", "data:", "data:srv", "data::ro", "/srv:data", "ro"])
def test_what_is_no_mount(text: str) -> None:
    with pytest.raises(Failure, match="is not a volume and a path"):
        formats.parse_mount(text)
