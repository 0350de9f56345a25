"""The playbooks of docs/recipes.md: the unchanged plays of that page, their errors, and a real gateway."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.memory_gateway import MemoryGateway
from tests.collection import agents
from tests.collection.recipes import Player, check_refusal, check_success
from tests.collection.runner import Target
from tests.support.gateway import Gateway
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def memory_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    with agents.serve(tmp_path_factory.mktemp("agents")) as made:
        yield made


@pytest.fixture
def gateway(memory_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield memory_gateway
    memory_gateway.clear()


@pytest.fixture
def player(gateway: MemoryGateway, tmp_path: Path) -> Player:
    return Player(tmp_path, gateway.unix_url)


def create_sandbox(gateway: MemoryGateway, name: str, **metadata: str) -> str:
    with gateway.client() as api:
        made = api.post("/sandboxes", json={"templateID": "base", "name": name, "metadata": metadata})
    assert made.status_code == 201, made.text
    ident: str = made.json()["sandboxID"]
    return ident


def change_sandbox(gateway: MemoryGateway, sandbox: str) -> None:
    """Change the sandbox's state in memory, as a write to its disk would."""
    gateway.machine(sandbox).state["written"] = secrets.token_hex(4)


def create_snapshot(gateway: MemoryGateway, sandbox: str, name: str) -> None:
    with gateway.client() as api:
        assert api.post(f"/sandboxes/{sandbox}/snapshots", json={"name": name}).status_code == 201


def list_snapshots(gateway: MemoryGateway) -> list[str]:
    with gateway.client() as api:
        return [name for each in api.get("/snapshots?limit=1000").json() for name in each["names"]]


# --- build_template --------------------------------------------------------------------------------------------------


def test_build_template(in_memory: Target) -> None:
    """On a host in memory, which runs none of a recipe's commands."""
    player = Player(in_memory.scratch, in_memory.url)
    assert "web would be built" in check_success(player.page("build_template", "--check"), 1)
    assert "web was built" in check_success(player.page("build_template"), 1)
    assert "web already exists with this recipe" in check_success(player.page("build_template"), 0)
    recipe = in_memory.client.get("/templates/web")["recipe"]
    assert recipe["packages"] == ["curl", "nginx-light"]
    assert recipe["readyProbe"] == "curl -fs http://localhost/"
    # The same values as a list and as text, and the empty values of a survey.
    others = {"build_packages": ["nginx-light", "curl"], "build_setup": "echo hello > /var/www/html/index.html\n"}
    check_success(player.page("build_template", **others, build_path="", build_suite="", build_cpus=""), 0)
    check_refusal(
        player.page("build_template", build_setup="true\n\nfalse\n"), "command 'false' failed with exit code 1"
    )
    assert in_memory.client.get("/templates/web")["recipe"] == recipe
    check_refusal(player.run("build_template"), "Set build_name")


# --- nightly_snapshots -----------------------------------------------------------------------------------------------


def test_nightly_snapshots(player: Player, gateway: MemoryGateway) -> None:
    boxes = [create_sandbox(gateway, name, team="blue") for name in ("web", "db", "x" * 64)]
    create_sandbox(gateway, "other", team="green")
    with gateway.client() as api:
        asleep = create_sandbox(gateway, "asleep", team="blue")
        assert api.post(f"/sandboxes/{asleep}/pause").status_code == 204
    for box in boxes:
        change_sandbox(gateway, box)
    first = {"nightly_stamp": "2026-01-01"}
    check_success(player.page("nightly_snapshots", "--check", **first), 1)
    assert list_snapshots(gateway) == []
    check_success(player.page("nightly_snapshots", **first), 1)
    taken = list_snapshots(gateway)
    assert sorted(taken)[:2] == ["db-2026-01-01", "web-2026-01-01"] and len(taken) == 3
    assert max(map(len, taken)) == 64 and taken[2].endswith(f"x-{boxes[2][:12]}-2026-01-01")
    with gateway.client() as api:
        assert api.get("/snapshots/web-2026-01-01").json()["sourceSandboxID"] == boxes[0]
    said = check_success(player.page("nightly_snapshots", **first), 0)
    assert re.search(r'"nothing_new": \[[^]]*"web-2026-01-01"', said), said

    # The next night captures only the changed sandbox, whatever the other options; metadata as text equals a mapping.
    change_sandbox(gateway, boxes[1])
    rule = {"nightly_keep_daily": "", "nightly_keep_last": 1, "nightly_metadata": "team=blue"}
    check_success(player.page("nightly_snapshots", nightly_stamp="2026-01-02", **rule), 1)
    # The previous one is removed a moment later.
    eventually(lambda: sorted(list_snapshots(gateway))[:2] == ["db-2026-01-02", "web-2026-01-01"])
    everything = {**rule, "nightly_metadata": "", "nightly_when_changed": "no", "nightly_stamp": "2026-01-03"}
    check_success(player.page("nightly_snapshots", **everything), 1)
    eventually(lambda: sorted(list_snapshots(gateway))[:3] == ["db-2026-01-03", "other-2026-01-03", "web-2026-01-03"])


def test_nightly_snapshots_with_failures(player: Player, gateway: MemoryGateway) -> None:
    for name in ("web", "db"):
        change_sandbox(gateway, create_sandbox(gateway, name, team="blue"))
    create_sandbox(gateway, "web-2026-01-01")
    played = player.page("nightly_snapshots", nightly_stamp="2026-01-01")
    check_refusal(played, "web-2026-01-01")
    assert list_snapshots(gateway) == ["db-2026-01-01"], "what goes wrong with one keeps no other from its snapshot"
    assert re.search(r'"failed": \[\s*"web-2026-01-01"\s*\]', played.output), played.output


def test_nightly_snapshots_with_missing_variables(player: Player) -> None:
    assert "No running sandbox has the metadata" in check_success(player.page("nightly_snapshots"), 0)
    check_refusal(player.run("nightly_snapshots", nightly_metadata="team blue"), "(team, blue is not valid)")


# --- roll_back -------------------------------------------------------------------------------------------------------


def test_roll_back(player: Player, gateway: MemoryGateway, tmp_path: Path) -> None:
    """Without a probe: any change since the snapshot counts as broken. The agents here share this machine's files."""
    web = create_sandbox(gateway, "web")
    create_snapshot(gateway, web, "web-2026-11-21")
    options = {"rollback_probe": "", "rollback_backup_name": "kept"}
    assert "web is not rolled back, because it is in the state of the snapshot" in check_success(
        player.page("roll_back", **options), 0
    )
    change_sandbox(gateway, web)
    changed = dict(gateway.machine(web).state)
    said = check_success(player.page("roll_back", "--check", **options), 1)
    assert '"files_changed_since": true' in said and '"kept_as": "kept"' in said
    assert list_snapshots(gateway) == ["web-2026-11-21"] and gateway.machine(web).state == changed
    check_success(player.page("roll_back", **options), 1)
    assert gateway.machine(web).state != changed and set(list_snapshots(gateway)) == {"web-2026-11-21", "kept"}
    check_success(player.page("roll_back", **options), 0)
    # The name is already in use, and nothing is rolled back without a backup.
    change_sandbox(gateway, web)
    check_refusal(player.page("roll_back", **options), "kept")
    assert "written" in gateway.machine(web).state
    check_success(player.page("roll_back", rollback_probe="", rollback_capture="no"), 1)
    assert set(list_snapshots(gateway)) == {"web-2026-11-21", "kept"}


def test_roll_back_with_a_probe(player: Player, gateway: MemoryGateway, tmp_path: Path) -> None:
    web = create_sandbox(gateway, "web")
    create_snapshot(gateway, web, "web-2026-11-21")
    change_sandbox(gateway, web)
    before = gateway.machine(web).identity
    works = tmp_path / "works"
    works.touch()
    assert "its probe succeeds" in check_success(player.page("roll_back", rollback_probe=f"test -e {works}"), 0)
    assert gateway.machine(web).identity == before, "though its files changed"

    works.unlink()
    check_refusal(
        player.page("roll_back", rollback_probe=f"test -e {works}", rollback_tries=1), "but its probe still fails"
    )
    (kept,) = set(list_snapshots(gateway)) - {"web-2026-11-21"}
    assert re.fullmatch(r"web-broken-\d{8}-\d{6}", kept)
    # It fails once and then succeeds, in an unchanged sandbox: the fault may be in memory only.
    flag = tmp_path / "flag"
    probe = f"test -e {flag} || ! touch {flag}"
    check_success(player.page("roll_back", rollback_probe=probe, rollback_backup_name="again"), 1)
    flag.unlink()
    check_success(player.page("roll_back", "--check", rollback_probe=probe), 1)
    hung = {"rollback_probe": f"test -e {flag}.2 || {{ touch {flag}.2; sleep 60; }}", "rollback_probe_seconds": 1}
    check_success(player.page("roll_back", **hung, rollback_capture=False), 1)


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"rollback_snapshot": ""}, "Set rollback_sandbox and rollback_snapshot"),
        ({"rollback_when": "broken"}, "broken needs a rollback_probe"),
        ({"rollback_snapshot": "none"}, "snapshot 'none' not found"),
    ],
)
def test_roll_back_with_missing_variables(
    player: Player, gateway: MemoryGateway, told: dict[str, str], sentence: str
) -> None:
    create_sandbox(gateway, "web")
    check_refusal(player.run("roll_back", **{"rollback_sandbox": "web", "rollback_snapshot": "base", **told}), sentence)


# --- fork_and_test ---------------------------------------------------------------------------------------------------


def test_fork_and_test_with_variants_as_text(player: Player, gateway: MemoryGateway, tmp_path: Path) -> None:
    create_sandbox(gateway, "web")
    lines = f"\none: sh -c 'echo 1 : > {tmp_path}/one'\n  two : cp /dev/null {tmp_path}/two\n"
    test = f"stat -c %s {tmp_path}/{{{{ fork_variant.name }}}}"
    run = player.run("fork_and_test", fork_source="web", fork_variants=lines, fork_test=test, fork_best="most")
    assert "web continues from web-try-one" in check_success(run) and (tmp_path / "one").read_text() == "1 :\n"


# --- on machines -----------------------------------------------------------------------------------------------------


def test_nightly_snapshot_and_rollback_on_virtual_machines(
    shared_gateway: Gateway, template: str, tmp_path: Path
) -> None:
    """Captured at night, broken during the day, rolled back with its memory. The broken state is kept."""
    api, player = shared_gateway, Player(tmp_path, shared_gateway.url)
    made = api.call("POST", "/sandboxes", {"templateID": template, "name": "night", "metadata": {"team": "night"}})
    box = made["sandboxID"]
    night = {"nightly_metadata": {"team": "night"}, "nightly_keep_daily": None, "nightly_keep_last": 2}
    serve = "setsid python3 -m http.server 8000 --directory /srv/www >/dev/null 2>&1 &"
    morning = {
        "rollback_sandbox": "night",
        "rollback_snapshot": "night-1",
        "rollback_probe": "python3 -c 'import urllib.request; urllib.request.urlopen(\"http://127.0.0.1:8000/index\")'",
        "rollback_backup_name": "night-kept",
    }
    try:
        api.sh(box, f"mkdir -p /srv/www && echo up > /srv/www/index && {serve} sleep 2")
        check_success(player.page("nightly_snapshots", nightly_stamp="1", **night), 1)
        check_success(player.page("nightly_snapshots", nightly_stamp="2", **night), 0)
        assert "its probe succeeds" in check_success(player.page("roll_back", **morning), 0)

        server = api.sh(box, "pgrep -f http.server").split()[0]
        api.sh(box, f"kill {server}; rm -r /srv/www; sync")
        said = check_success(player.page("roll_back", **morning), 1)
        assert '"kept_as": "night-kept"' in said
        assert api.sh(box, "cat /srv/www/index; pgrep -f http.server").split()[:2] == ["up", server], "the same process"
        assert "its probe succeeds" in check_success(player.page("roll_back", **morning), 0)
        assert api.call("GET", "/snapshots/night-kept")["sourceSandboxID"] == box
    finally:
        api.client.delete(f"/sandboxes/{box}")
        for name in ("night-1", "night-2", "night-kept"):
            api.client.delete(f"/snapshots/{name}?when=unused")
