"""Test the playbooks of docs/recipes.md with the unchanged plays on that page, with errors, and on virtual machines."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import InUse
from tests.collection import agents
from tests.collection.recipes import PlaybookRunner, check_refusal, check_success
from tests.collection.runner import Target
from tests.support.age import make_key
from tests.support.gateway import Gateway
from tests.support.memory_gateway import MemoryGateway
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def memory_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.running_gateway(tmp_path_factory.mktemp("agents")) as server:
        yield server


@pytest.fixture
def gateway(memory_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield memory_gateway
    memory_gateway.clear()


@pytest.fixture
def playbook_runner(gateway: MemoryGateway, tmp_path: Path) -> PlaybookRunner:
    return PlaybookRunner(tmp_path, gateway.unix_url)


def create_sandbox(gateway: MemoryGateway, name: str, **metadata: str) -> str:
    with gateway.client() as api:
        response = api.post("/sandboxes", json={"templateID": "base", "name": name, "metadata": metadata})
    assert response.status_code == 201, response.text
    sandbox_id: str = response.json()["sandboxID"]
    return sandbox_id


def change_sandbox(gateway: MemoryGateway, sandbox: str) -> None:
    """Change the state of the sandbox, as a write to its disk would."""
    gateway.machine(sandbox).state["written"] = secrets.token_hex(4)


def create_snapshot(gateway: MemoryGateway, sandbox: str, name: str) -> None:
    with gateway.client() as api:
        assert api.post(f"/sandboxes/{sandbox}/snapshots", json={"name": name}).status_code == 201


def list_snapshot_names(gateway: MemoryGateway) -> list[str]:
    with gateway.client() as api:
        return [name for each in api.get("/snapshots?limit=1000").json() for name in each["names"]]


# --- build_template --------------------------------------------------------------------------------------------------


def test_build_template_builds_only_changed_recipes(memory_target: Target) -> None:
    """The in-memory host does not run the recipe's commands."""
    playbook_runner = PlaybookRunner(memory_target.scratch, memory_target.url)
    assert "web would be built" in check_success(playbook_runner.run_documented_play("build_template", "--check"), 1)
    assert "web was built" in check_success(playbook_runner.run_documented_play("build_template"), 1)
    assert "web already exists with this recipe" in check_success(
        playbook_runner.run_documented_play("build_template"), 0
    )
    recipe = memory_target.client.get("/templates/web")["recipe"]
    assert recipe["packages"] == ["curl", "nginx-light"]
    assert recipe["readyProbe"] == "curl -fs http://localhost/"
    # A survey passes lists as text, and an empty string for each question without an answer.
    text_variables = {
        "build_packages": ["nginx-light", "curl"],
        "build_setup": "echo hello > /var/www/html/index.html\n",
    }
    check_success(
        playbook_runner.run_documented_play(
            "build_template", **text_variables, build_path="", build_suite="", build_cpus=""
        ),
        0,
    )
    check_refusal(
        playbook_runner.run_documented_play("build_template", build_setup="true\n\nfalse\n"),
        "command 'false' failed with exit code 1",
    )
    assert memory_target.client.get("/templates/web")["recipe"] == recipe
    check_refusal(playbook_runner.run("build_template"), "Set build_name")


# --- nightly_snapshots -----------------------------------------------------------------------------------------------


def test_nightly_snapshots_applies_the_retention_rule(playbook_runner: PlaybookRunner, gateway: MemoryGateway) -> None:
    sandbox_ids = [create_sandbox(gateway, name, team="blue") for name in ("web", "db", "x" * 64)]
    create_sandbox(gateway, "other", team="green")
    with gateway.client() as api:
        paused_sandbox_id = create_sandbox(gateway, "asleep", team="blue")
        assert api.post(f"/sandboxes/{paused_sandbox_id}/pause").status_code == 204
    for box in sandbox_ids:
        change_sandbox(gateway, box)
    first_night_variables = {"nightly_stamp": "2026-01-01"}
    check_success(playbook_runner.run_documented_play("nightly_snapshots", "--check", **first_night_variables), 1)
    assert list_snapshot_names(gateway) == []
    check_success(playbook_runner.run_documented_play("nightly_snapshots", **first_night_variables), 1)
    snapshot_names = list_snapshot_names(gateway)
    assert sorted(snapshot_names)[:2] == ["db-2026-01-01", "web-2026-01-01"] and len(snapshot_names) == 3
    assert max(map(len, snapshot_names)) == 64 and snapshot_names[2].endswith(f"x-{sandbox_ids[2][:12]}-2026-01-01")
    with gateway.client() as api:
        assert api.get("/snapshots/web-2026-01-01").json()["sourceSandboxID"] == sandbox_ids[0]
    output = check_success(playbook_runner.run_documented_play("nightly_snapshots", **first_night_variables), 0)
    assert re.search(r'"nothing_new": \[[^]]*"web-2026-01-01"', output), output

    # The next run captures only the changed sandbox. Metadata can be text instead of a mapping.
    change_sandbox(gateway, sandbox_ids[1])
    rule_variables = {"nightly_keep_daily": "", "nightly_keep_last": 1, "nightly_metadata": "team=blue"}
    check_success(
        playbook_runner.run_documented_play("nightly_snapshots", nightly_stamp="2026-01-02", **rule_variables), 1
    )
    # The previous snapshot is removed shortly afterwards.
    wait_until(lambda: sorted(list_snapshot_names(gateway))[:2] == ["db-2026-01-02", "web-2026-01-01"])
    all_sandboxes_variables = {
        **rule_variables,
        "nightly_metadata": "",
        "nightly_when_changed": "no",
        "nightly_stamp": "2026-01-03",
    }
    check_success(playbook_runner.run_documented_play("nightly_snapshots", **all_sandboxes_variables), 1)
    wait_until(
        lambda: sorted(list_snapshot_names(gateway))[:3] == ["db-2026-01-03", "other-2026-01-03", "web-2026-01-03"]
    )


def test_nightly_snapshots_continues_after_a_failure(playbook_runner: PlaybookRunner, gateway: MemoryGateway) -> None:
    for name in ("web", "db"):
        change_sandbox(gateway, create_sandbox(gateway, name, team="blue"))
    create_sandbox(gateway, "web-2026-01-01")
    run = playbook_runner.run_documented_play("nightly_snapshots", nightly_stamp="2026-01-01")
    check_refusal(run, "web-2026-01-01")
    assert list_snapshot_names(gateway) == ["db-2026-01-01"], (
        "an error in one sandbox must not prevent the snapshots of others"
    )
    assert re.search(r'"failed": \[\s*"web-2026-01-01"\s*\]', run.output), run.output


def test_nightly_snapshots_reports_invalid_variables(playbook_runner: PlaybookRunner) -> None:
    assert "No running sandbox has the metadata" in check_success(
        playbook_runner.run_documented_play("nightly_snapshots"), 0
    )
    check_refusal(playbook_runner.run("nightly_snapshots", nightly_metadata="team blue"), "(team, blue is not valid)")


# --- nightly_backups and restore_backup ------------------------------------------------------------------------------


def create_volume(gateway: MemoryGateway, name: str, **files: str) -> None:
    with gateway.client() as api:
        assert api.post("/volumes", json={"name": name, "sizeMB": 64}).status_code == 201
    volume_id = gateway.engine.volumes.get(name).id
    gateway.host.files[volume_id] = dict(files)


def list_volume_snapshots(gateway: MemoryGateway, volume: str) -> list[str]:
    with gateway.client() as api:
        return [each["name"] for each in api.get(f"/volumes/{volume}/snapshots").json()]


def test_nightly_backups_are_written_once_pruned_and_restored(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    directory = tmp_path / "backups"
    variables = {"backup_directory": str(directory), "backup_keep": 2}

    def back_up(stamp: str, changed_task_count: int, *options: str) -> str:
        run = playbook_runner.run_documented_play("nightly_backups", *options, backup_stamp=stamp, **variables)
        return check_success(run, changed_task_count)

    create_sandbox(gateway, "web", team="blue")
    create_sandbox(gateway, "other", team="green")
    for name in ("data", "code", "unlisted"):
        create_volume(gateway, name, color="blue")
    with gateway.client() as api:
        assert api.post("/volumes/data/snapshots", json={"name": "own"}).status_code == 201
    back_up("1", 3, "--check")
    assert not directory.exists() and list_volume_snapshots(gateway, "data") == ["own"]
    assert "Backed up web, data, code" in back_up("1", 3)
    assert sorted(path.name for path in directory.iterdir()) == ["code@1.volume", "data@1.volume", "web@1.snapshot"]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    back_up("1", 0)
    # A volume that no longer exists keeps its files. The directory also contains files of others.
    (directory / "notes.txt").touch()
    incomplete_file = directory / ".web@0.snapshot.partial"
    incomplete_file.touch()
    os.utime(incomplete_file, (0, 0))
    with gateway.client() as api:
        assert api.delete("/volumes/code?withSnapshots=true").status_code == 204
    variables["backup_volumes"] = ["data"]
    back_up("2", 4)
    back_up("3", 4)
    expected_names = [
        "code@1.volume",
        "data@2.volume",
        "data@3.volume",
        "notes.txt",
        "web@2.snapshot",
        "web@3.snapshot",
    ]
    assert sorted(path.name for path in directory.iterdir()) == expected_names
    assert list_volume_snapshots(gateway, "data") == ["own", "backup-3"]
    back_up("3", 0)

    for name, file in (("new", "web@3.snapshot"), ("new-data", "data@2.volume")):
        restore_variables = {"restore_file": str(directory / file), "restore_name": name}
        change_count = 2 if name == "new" else 1
        check_success(
            playbook_runner.run_documented_play("restore_backup", "--check", **restore_variables), change_count
        )
        check_success(playbook_runner.run_documented_play("restore_backup", **restore_variables), change_count)
        check_success(playbook_runner.run_documented_play("restore_backup", **restore_variables), 0)
    with gateway.client() as api:
        assert api.get("/sandboxes/new").json()["state"] == "running"
    assert gateway.host.files[gateway.engine.volumes.get("new-data").id] == {"color": "blue"}


def test_nightly_backups_can_be_encrypted(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    create_sandbox(gateway, "web", team="blue")
    create_volume(gateway, "data", color="blue")
    key, other_key = make_key(tmp_path / "key"), make_key(tmp_path / "other-key")
    directory = tmp_path / "backups"
    variables = {
        "backup_directory": str(directory),
        "backup_keep": 1,
        "backup_volumes": "data",
        "backup_age_recipients": f"{key.recipient}, {other_key.recipient}",
    }
    for stamp, change_count in (("1", 3), ("1", 0), ("2", 4)):
        run = playbook_runner.run_documented_play("nightly_backups", backup_stamp=stamp, **variables)
        check_success(run, change_count)
    names = [".data@2.volume.exported", ".web@2.snapshot.exported", "data@2.volume", "web@2.snapshot"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert all((directory / name).read_bytes().startswith(b"age-encryption.org/v1") for name in names[2:])
    for name, file, change_count in (("new", "web@2.snapshot", 2), ("new-data", "data@2.volume", 1)):
        options = {"restore_file": str(directory / file), "restore_name": name}
        refusal = playbook_runner.run_documented_play("restore_backup", **options)
        check_refusal(refusal, f"{directory}/{file} is encrypted: set age_identity")
        options["restore_age_identity"] = key.path
        check_success(playbook_runner.run_documented_play("restore_backup", "--check", **options), change_count)
        check_success(playbook_runner.run_documented_play("restore_backup", **options), change_count)
        check_success(playbook_runner.run_documented_play("restore_backup", **options), 0)
    assert gateway.host.files[gateway.engine.volumes.get("new-data").id] == {"color": "blue"}


def test_nightly_backups_continue_after_a_failure(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    for name in ("web", "db"):
        create_sandbox(gateway, name, team="blue")
    create_volume(gateway, "data")
    (tmp_path / "backups").mkdir()
    (tmp_path / "backups" / "web@1.snapshot").write_text("not a backup")
    variables = {"backup_directory": str(tmp_path / "backups"), "backup_stamp": "1", "backup_volumes": "data missing"}
    run = playbook_runner.run_documented_play("nightly_backups", **variables)
    check_refusal(run, "There is no backup of web, missing, see the errors above.")
    names = sorted(path.name for path in (tmp_path / "backups").iterdir())
    assert names == ["data@1.volume", "db@1.snapshot", "web@1.snapshot"]
    assert (tmp_path / "backups" / "web@1.snapshot").read_text() == "not a backup"


def test_nightly_backups_report_snapshots_that_cannot_be_removed(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any) -> None:
        raise InUse("a clone depends on it")

    create_volume(gateway, "data")
    variables = {"backup_directory": str(tmp_path / "backups"), "backup_volumes": "data", "backup_keep": 1}
    check_success(playbook_runner.run_documented_play("nightly_backups", backup_stamp="1", **variables), 2)
    monkeypatch.setattr(gateway.engine.volumes, "delete_snapshot", refuse)
    run = playbook_runner.run_documented_play("nightly_backups", backup_stamp="2", **variables)
    check_refusal(
        run, "Snapshots of earlier backups of these volumes could not be removed: data, see the errors above."
    )
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["data@2.volume"], "old files are removed"


def test_backup_playbooks_report_invalid_variables(playbook_runner: PlaybookRunner) -> None:
    check_refusal(playbook_runner.run("nightly_backups"), "Set backup_directory to an absolute path")
    invalid_variables = {"backup_directory": "/srv/backups", "backup_stamp": "../1"}
    check_refusal(playbook_runner.run("nightly_backups", **invalid_variables), "Set backup_directory")
    check_refusal(playbook_runner.run("restore_backup", restore_file="/file", restore_name="a"), "Set restore_file")


# --- roll_back -------------------------------------------------------------------------------------------------------


def test_rollback_restores_changed_sandboxes(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    """Without a probe, any change since the snapshot means that the sandbox is broken."""
    web_id = create_sandbox(gateway, "web")
    create_snapshot(gateway, web_id, "web-2026-11-21")
    options = {"rollback_probe": "", "rollback_backup_name": "kept"}
    assert "web is not rolled back, because it is in the state of the snapshot" in check_success(
        playbook_runner.run_documented_play("roll_back", **options), 0
    )
    change_sandbox(gateway, web_id)
    changed_state = dict(gateway.machine(web_id).state)
    output = check_success(playbook_runner.run_documented_play("roll_back", "--check", **options), 1)
    assert '"files_changed_since": true' in output and '"kept_as": "kept"' in output
    assert list_snapshot_names(gateway) == ["web-2026-11-21"] and gateway.machine(web_id).state == changed_state
    check_success(playbook_runner.run_documented_play("roll_back", **options), 1)
    assert gateway.machine(web_id).state != changed_state and set(list_snapshot_names(gateway)) == {
        "web-2026-11-21",
        "kept",
    }
    check_success(playbook_runner.run_documented_play("roll_back", **options), 0)
    # If the backup's name is already in use, nothing is rolled back.
    change_sandbox(gateway, web_id)
    check_refusal(playbook_runner.run_documented_play("roll_back", **options), "kept")
    assert "written" in gateway.machine(web_id).state
    check_success(playbook_runner.run_documented_play("roll_back", rollback_probe="", rollback_capture="no"), 1)
    assert set(list_snapshot_names(gateway)) == {"web-2026-11-21", "kept"}


def test_roll_back_restores_sandboxes_whose_probe_fails(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    web_id = create_sandbox(gateway, "web")
    create_snapshot(gateway, web_id, "web-2026-11-21")
    change_sandbox(gateway, web_id)
    identity_before = gateway.machine(web_id).identity
    marker = tmp_path / "works"
    marker.touch()
    assert "its probe succeeds" in check_success(
        playbook_runner.run_documented_play("roll_back", rollback_probe=f"test -e {marker}"), 0
    )
    assert gateway.machine(web_id).identity == identity_before, "files have changed, but the sandbox is not rolled back"

    marker.unlink()
    check_refusal(
        playbook_runner.run_documented_play("roll_back", rollback_probe=f"test -e {marker}", rollback_tries=1),
        "but its probe still fails",
    )
    (backup,) = set(list_snapshot_names(gateway)) - {"web-2026-11-21"}
    assert re.fullmatch(r"web-broken-\d{8}-\d{6}", backup)
    # The probe fails once in an unchanged sandbox and then succeeds, because a fault may be in memory only.
    flag_file = tmp_path / "flag"
    probe = f"test -e {flag_file} || ! touch {flag_file}"
    check_success(
        playbook_runner.run_documented_play("roll_back", rollback_probe=probe, rollback_backup_name="again"), 1
    )
    flag_file.unlink()
    check_success(playbook_runner.run_documented_play("roll_back", "--check", rollback_probe=probe), 1)
    timeout_options = {
        "rollback_probe": f"test -e {flag_file}.2 || {{ touch {flag_file}.2; sleep 60; }}",
        "rollback_probe_seconds": 1,
    }
    check_success(playbook_runner.run_documented_play("roll_back", **timeout_options, rollback_capture=False), 1)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"rollback_snapshot": ""}, "Set rollback_sandbox and rollback_snapshot"),
        ({"rollback_when": "broken"}, "With broken, also set rollback_probe"),
        ({"rollback_snapshot": "none"}, "snapshot 'none' not found"),
    ],
)
def test_roll_back_reports_invalid_variables(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, variables: dict[str, str], sentence: str
) -> None:
    create_sandbox(gateway, "web")
    check_refusal(
        playbook_runner.run("roll_back", **{"rollback_sandbox": "web", "rollback_snapshot": "base", **variables}),
        sentence,
    )


# --- fork_and_test ---------------------------------------------------------------------------------------------------


def test_fork_and_test_accepts_variants_as_text(
    playbook_runner: PlaybookRunner, gateway: MemoryGateway, tmp_path: Path
) -> None:
    create_sandbox(gateway, "web")
    variants_text = f"\none: sh -c 'echo 1 : > {tmp_path}/one'\n  two : cp /dev/null {tmp_path}/two\n"
    test_command = f"stat -c %s {tmp_path}/{{{{ fork_variant.name }}}}"
    run = playbook_runner.run(
        "fork_and_test", fork_source="web", fork_variants=variants_text, fork_test=test_command, fork_best="most"
    )
    assert "web continues from web-try-one" in check_success(run) and (tmp_path / "one").read_text() == "1 :\n"


# --- on machines -----------------------------------------------------------------------------------------------------


def test_a_broken_virtual_machine_is_rolled_back_to_its_nightly_snapshot(
    shared_gateway: Gateway, template: str, tmp_path: Path
) -> None:
    """Capture a sandbox, break it, and roll it back with its memory. A snapshot keeps the broken state."""
    api, playbook_runner = shared_gateway, PlaybookRunner(tmp_path, shared_gateway.url)
    sandbox = api.call("POST", "/sandboxes", {"templateID": template, "name": "night", "metadata": {"team": "night"}})
    sandbox_id = sandbox["sandboxID"]
    nightly_variables = {"nightly_metadata": {"team": "night"}, "nightly_keep_daily": None, "nightly_keep_last": 2}
    serve_command = "setsid python3 -m http.server 8000 --directory /srv/www >/dev/null 2>&1 &"
    rollback_variables = {
        "rollback_sandbox": "night",
        "rollback_snapshot": "night-1",
        "rollback_probe": "python3 -c 'import urllib.request; urllib.request.urlopen(\"http://127.0.0.1:8000/index\")'",
        "rollback_backup_name": "night-kept",
    }
    try:
        api.sh(sandbox_id, f"mkdir -p /srv/www && echo up > /srv/www/index && {serve_command} sleep 2")
        check_success(
            playbook_runner.run_documented_play("nightly_snapshots", nightly_stamp="1", **nightly_variables), 1
        )
        check_success(
            playbook_runner.run_documented_play("nightly_snapshots", nightly_stamp="2", **nightly_variables), 0
        )
        assert "its probe succeeds" in check_success(
            playbook_runner.run_documented_play("roll_back", **rollback_variables), 0
        )

        server_pid = api.sh(sandbox_id, "pgrep -f http.server").split()[0]
        api.sh(sandbox_id, f"kill {server_pid}; rm -r /srv/www; sync")
        output = check_success(playbook_runner.run_documented_play("roll_back", **rollback_variables), 1)
        assert '"kept_as": "night-kept"' in output
        assert api.sh(sandbox_id, "cat /srv/www/index; pgrep -f http.server").split()[:2] == ["up", server_pid], (
            "the captured process must run again"
        )
        assert "its probe succeeds" in check_success(
            playbook_runner.run_documented_play("roll_back", **rollback_variables), 0
        )
        assert api.call("GET", "/snapshots/night-kept")["sourceSandboxID"] == sandbox_id
    finally:
        api.client.delete(f"/sandboxes/{sandbox_id}")
        for name in ("night-1", "night-2", "night-kept"):
            api.client.delete(f"/snapshots/{name}?when=unused")
