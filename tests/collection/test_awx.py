"""playbooks/awx: the declaration against a small AWX, and the jobs that this AWX then starts, by ansible-runner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.api.memory_gateway import ADMIN_KEY, MemoryGateway
from tests.collection import agents, awx_collection, awx_survey
from tests.collection.awx_server import HIDDEN, MODULES, TOKEN, Awx, Refused, serve
from tests.collection.recipes import SECONDS, Player, check_refusal, check_success, plays_by_playbook, run_playbook
from tests.freebsd_shim.harness import shim_in
from tests.jail_zfs import pools
from tests.support import session
from tests.support.roles import environment, play

PLAYBOOKS = session.REPOSITORY / "playbooks"
TEMPLATES = yaml.safe_load((PLAYBOOKS / "awx" / "vars" / "job_templates.yml").read_text())["awx_job_templates"]
NAMES = {template["playbook"]: template["name"] for template in TEMPLATES}


@dataclass
class Declared:
    """The small AWX, and the play of docs/awx.md that declares everything. ``said``: the output of the first run."""

    awx: Awx
    url: str
    gateway: MemoryGateway
    scratch: Path
    said: str = ""

    def declare(self, *options: str, **variables: Any) -> tuple[bool, str]:
        """Run the play. Returns whether it failed, and its output."""
        play = plays_by_playbook()["grove.sandbox.awx.declare"]
        told = {
            **play["vars"],
            "awx_gateway_url": self.gateway.url,
            "awx_machine_credential": "Root of the hosts",
            "awx_hosts": {"here": {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}},
            **variables,
        }
        book = self.scratch / "declare.yml"
        book.write_text(json.dumps([{**play, "vars": told}]))
        played = run_playbook(
            self.scratch,
            str(book),
            *options,
            ANSIBLE_COLLECTIONS_PATH=f"{session.COLLECTIONS}:{awx_collection.collections_path()}",
            CONTROLLER_HOST=self.url,
            CONTROLLER_OAUTH_TOKEN=TOKEN,
            SANDBOX_GATEWAY_TOKEN=ADMIN_KEY,
        )
        return played.failed, played.output


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Declared]:
    awx = Awx(session.REPOSITORY)
    with agents.serve(tmp_path_factory.mktemp("agents")) as gateway, serve(awx) as url:
        made = Declared(awx, url, gateway, tmp_path_factory.mktemp("awx"))
        failed, made.said = made.declare()
        assert not failed, made.said
        yield made


def changed(output: str) -> int:
    found = re.search(r"changed=(\d+) .*failed=0", output)
    assert found, output
    return int(found[1])


# --- the declaration -------------------------------------------------------------------------------------------------


def test_a_second_declaration_changes_nothing(declared: Declared) -> None:
    assert changed(declared.said) >= 9, declared.said
    made = {endpoint: {item["name"] for item in table.values()} for endpoint, table in declared.awx.tables.items()}
    assert made["job_templates"] == set(NAMES.values())
    assert made["inventories"] == {"Sandboxes", "Sandbox hosts"} and made["hosts"] == {"here"}
    assert made["schedules"] == {"Every night"} and made["execution_environments"] == {"Sandboxes"}
    credential = declared.awx.find_by_name("credentials", "Sandbox gateway")
    assert credential["inputs"] == {"url": declared.gateway.url, "token": ADMIN_KEY}
    assert ADMIN_KEY not in declared.said

    declared.awx.writes.clear()
    failed, said = declared.declare("--diff")
    assert not failed and changed(said) == 0 and declared.awx.writes == [], said


def test_only_differences_are_corrected(declared: Declared) -> None:
    awx = declared.awx
    template = awx.find_by_name("job_templates", "Build a template")
    awx.surveys[template["id"]]["spec"][0]["required"] = False
    awx.tables["job_templates"][template["id"]]["description"] = "by hand"
    awx.attached[template["id"]].clear()
    awx.writes.clear()
    failed, said = declared.declare(awx_gateway_token="another-key-0123456789", awx_new_token=True)
    assert not failed and changed(said) == 2, said
    credential, place = awx.find_by_name("credentials", "Sandbox gateway"), f"/api/v2/job_templates/{template['id']}/"
    assert awx.writes == [
        ("PATCH", f"/api/v2/credentials/{credential['id']}/"),
        *[("PATCH", place), ("POST", f"{place}credentials/"), ("POST", f"{place}survey_spec/")],
    ]
    assert credential["inputs"]["token"] == "another-key-0123456789"
    credential["inputs"]["token"] = ADMIN_KEY


@pytest.mark.parametrize("missing", ["awx_image", "awx_gateway_url"])
def test_missing_variables_are_reported(declared: Declared, missing: str) -> None:
    declared.awx.writes.clear()
    failed, said = declared.declare(**{missing: "unix:///a/socket" if missing == "awx_gateway_url" else ""})
    assert failed and "Set awx_project_url to a Git repository" in said
    assert declared.awx.writes == []


# --- the small AWX rejects wrong requests ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unknown field": ("POST", "organizations", {"name": "a", "colour": "red"}),
    "option of the module": ("POST", "organizations", {"name": "a", "state": "present"}),
    "name taken": ("POST", "organizations", {"name": "Default"}),
    "no name": ("POST", "organizations", {"description": "a"}),
    "wrong type": ("POST", "organizations", {"name": "a", "max_hosts": "many"}),
    "no such thing": ("POST", "inventories", {"name": "a", "organization": 4096}),
    "no choice": ("POST", "execution_environments", {"name": "a", "image": "b", "pull": "often"}),
    "mapping where text is wanted": ("POST", "hosts", {"name": "a", "inventory": "Sandboxes", "variables": {"a": 1}}),
    "kind of credential": ("POST", "credential_types", {"name": "a", "kind": "ssh"}),
    "key of inputs": ("POST", "credential_types", {"name": "a", "kind": "cloud", "inputs": {"fields": [{"id": "a"}]}}),
    "injected name": (
        "POST",
        "credential_types",
        {"name": "a", "kind": "cloud", "injectors": {"env": {"ANSIBLE_A": "b"}}},
    ),
    "injected value": (
        "POST",
        "credential_types",
        {"name": "a", "kind": "cloud", "injectors": {"env": {"A": "{{ b }}"}}},
    ),
    "unknown input": ("POST", "credentials", {"name": "a", "credential_type": "Sandbox gateway", "inputs": {"b": "c"}}),
    "playbook": ("PATCH", "job_templates/Build a template", {"playbook": "playbooks/none.yml"}),
    "source": ("PATCH", "inventory_sources/Gateway", {"source_path": "none.yml"}),
    "machine's credential": ("PATCH", "inventory_sources/Gateway", {"credential": "Root of the hosts"}),
    "rrule": ("PATCH", "schedules/Every night", {"rrule": "every night"}),
    "answers of a schedule": ("PATCH", "schedules/Every night", {"extra_data": {"nightly_memory": "much"}}),
    "survey without items": (
        "POST",
        "job_templates/Build a template/survey_spec",
        {"name": "", "description": "", "spec": []},
    ),
    "filter": ("GET", "projects?colour=red", {}),
    "path": ("GET", "colours", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_awx_double_refuses_invalid_requests(declared: Declared, case: str) -> None:
    method, place, body = REFUSED[case]
    awx = declared.awx
    endpoint, _, rest = place.partition("/")
    name, _, sub = rest.partition("/")
    steps = [endpoint, str(awx.find_by_name(endpoint, name)["id"]), sub] if name else [place]
    ids = {"inventory": "inventories", "credential_type": "credential_types", "credential": "credentials"}
    named = {key: awx.find_by_name(ids[key], value)["id"] if key in ids else value for key, value in body.items()}
    path, query, found = f"/api/v2/{'/'.join(filter(None, steps))}".partition("?")
    before = len(awx.writes)
    status, said = awx.answer(method, f"{path}/{query}{found}", named, TOKEN)
    assert status in (400, 404) and said and len(awx.writes) == before, said


def test_the_awx_double_needs_a_token_and_hides_secrets(declared: Declared) -> None:
    assert declared.awx.answer("GET", "/api/v2/projects/", None, "wrong")[0] == 401
    status, found = declared.awx.answer("GET", "/api/v2/credentials/?name=Sandbox+gateway", None, TOKEN)
    assert status == 200 and found["results"][0]["inputs"] == {"url": declared.gateway.url, "token": HIDDEN}


def test_the_doubles_fields_match_the_modules() -> None:
    for endpoint, module in MODULES.items():
        assert "name" in awx_collection.module_options(module), endpoint


# --- surveys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template["playbook"])
def test_a_survey_asks_for_the_playbooks_variables(template: dict[str, Any]) -> None:
    survey = {"name": template["name"], "description": template["description"], "spec": template["survey"]}
    assert awx_survey.find_problem(survey) == ""
    read = (PLAYBOOKS / f"{template['playbook']}.yml").read_text()
    read += (PLAYBOOKS / "vars" / f"{template['playbook']}.yml").read_text()
    roles = "".join(path.read_text() for path in (session.REPOSITORY / "roles").glob("*/meta/argument_specs.yml"))
    for question in template["survey"]:
        name = question["variable"]
        assert re.search(rf"\b{name}\b", roles if name.startswith(("kvm_", "jail_")) else read), name
        assert question["question_description"], name


ANSWERS: dict[str, dict[str, Any]] = {
    "install_host": {},
    "build_template": {"build_name": "web"},
    "nightly_snapshots": {},
    "roll_back": {"rollback_sandbox": "web", "rollback_snapshot": "before"},
    "fork_and_test": {"fork_source": "web"},
}
"""The answers that every job needs to start."""
WRONG = [
    ("install_host", {"install_kind": "cloud"}, "one of the choices"),
    ("install_host", {"kvm_xfs_host_loop_size_mb": "64 GB"}, "to be integer"),
    ("build_template", {"build_memory_mb": 1}, "too small"),
    ("build_template", {"build_name": "a" * 65}, "too large"),
    ("nightly_snapshots", {"nightly_keep_daily": 0}, "too small"),
    ("nightly_snapshots", {"nightly_when_changed": True}, "one of the choices"),
    ("roll_back", {"rollback_when": "often"}, "one of the choices"),
    ("fork_and_test", {"fork_source": ""}, "too small"),
    ("fork_and_test", {"fork_best": "best"}, "one of the choices"),
]


@pytest.mark.parametrize("playbook", NAMES)
def test_a_job_starts_with_its_required_answers_only(declared: Declared, playbook: str) -> None:
    declared.awx.launch(NAMES[playbook], ANSWERS[playbook])
    for missing in ANSWERS[playbook]:
        others = {name: answer for name, answer in ANSWERS[playbook].items() if name != missing}
        with pytest.raises(Refused, match=f"'{missing}' value missing"):
            declared.awx.launch(NAMES[playbook], others)


@pytest.mark.parametrize(("playbook", "answer", "message"), WRONG)
def test_an_invalid_answer_starts_no_job(
    declared: Declared, playbook: str, answer: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        declared.awx.launch(NAMES[playbook], {**ANSWERS[playbook], **answer})


# --- jobs ------------------------------------------------------------------------------------------------------------

Launch = Callable[..., str]


@pytest.fixture
def launch(declared: Declared, tmp_path: Path) -> Iterator[Launch]:
    """``launch(playbook, answers…)`` starts the job as AWX would, by ansible-runner, and returns its output."""

    def launch(playbook: str, *options: str, inside: tuple[str, ...] = (), **answers: Any) -> str:
        job = declared.awx.launch(NAMES[playbook], {**ANSWERS[playbook], **answers})
        assert job["playbook"] == f"playbooks/{playbook}.yml"
        place = tmp_path / playbook
        for name in ("env", "inventory", "project"):
            (place / name).mkdir(parents=True, exist_ok=True)
        (place / "env" / "extravars").write_text(json.dumps(job["extra_vars"]))
        (place / "env" / "envvars").write_text(json.dumps({**job["env"], "ANSIBLE_HOME": str(place / "home")}))
        (place / "env" / "cmdline").write_text(" ".join(options))
        if job["inventory"] == "Sandboxes":
            source = declared.awx.find_by_name("inventory_sources", "Gateway")["source_path"]
            (place / "inventory" / "sandboxes.yml").write_text((session.REPOSITORY / source).read_text())
        else:
            (place / "inventory" / "hosts.json").write_text(json.dumps({"all": {"hosts": job["hosts"]}}))
        runner = Path(sys.executable).with_name("ansible-runner")
        done = subprocess.run(
            [*inside, str(runner), "run", str(place), "-p", f"grove.sandbox.{playbook}"],
            env={name: value for name, value in environment(place).items() if not name.startswith("SANDBOX_")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        (artifacts,) = (place / "artifacts").glob("*/rc")
        assert int(artifacts.read_text()) == done.returncode
        assert ADMIN_KEY not in done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        for path in (place / "artifacts").iterdir():
            path.rename(place / path.name)
        return done.stdout

    yield launch
    declared.gateway.clear()


def create_sandbox(declared: Declared, name: str, **metadata: str) -> None:
    with declared.gateway.client() as api:
        made = api.post("/sandboxes", json={"templateID": "base", "name": name, "metadata": metadata})
        assert made.status_code == 201, made.text


def test_the_inventory_lists_the_sandboxes(declared: Declared, launch: Launch) -> None:
    create_sandbox(declared, "web")
    source = session.REPOSITORY / declared.awx.find_by_name("inventory_sources", "Gateway")["source_path"]
    env = declared.awx.launch("Nightly snapshots", {})["env"]
    assert env == {"SANDBOX_GATEWAY_URL": declared.gateway.url, "SANDBOX_GATEWAY_TOKEN": ADMIN_KEY}
    program = Path(sys.executable).with_name("ansible-inventory")
    listed = subprocess.run(
        [str(program), "-i", str(source), "--list", "--export"],
        env={**os.environ, **environment(declared.scratch), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(listed.stdout)["template_base"]["hosts"] == ["web"] and ADMIN_KEY not in listed.stdout


def test_the_build_job(declared: Declared, launch: Launch) -> None:
    assert "web was built" in launch("build_template", build_packages="curl", build_setup="true\ntrue\n")
    with declared.gateway.client() as api:
        recipe = api.get("/templates/web").json()["recipe"]
        assert (recipe["packages"], recipe["setup"], recipe["memoryMB"]) == (["curl"], ["true", "true"], 256)
        api.delete("/templates/web").raise_for_status()


def test_the_nightly_job_and_the_morning_job(declared: Declared, launch: Launch) -> None:
    """With the schedule's own answers. The next job runs in check mode first."""
    create_sandbox(declared, "web", team="blue")
    create_sandbox(declared, "other")
    answers = declared.awx.find_by_name("schedules", "Every night")["extra_data"]
    launch("nightly_snapshots", **answers, nightly_when_changed="no")
    with declared.gateway.client() as api:
        (taken,) = api.get("/snapshots").json()
        assert re.fullmatch(r"web-\d{4}-\d\d-\d\d", taken["names"][0])
        asked = {"rollback_snapshot": taken["names"][0], "rollback_when": "broken", "rollback_backup_name": "kept"}
        head = api.get("/sandboxes/web").json()
        broken = declared.scratch / "mended"
        probe = f"test -e {broken} || ! touch {broken}"
        assert '"kept_as": "kept"' in launch("roll_back", "--check", **asked, rollback_probe="false")
        assert api.get("/sandboxes/web").json()["startedAt"] == head["startedAt"]
        launch("roll_back", **asked, rollback_probe=probe)
        assert api.get("/snapshots/kept").json()["sourceSandboxID"] == head["sandboxID"]


def test_the_fork_and_test_job(declared: Declared, launch: Launch, tmp_path: Path) -> None:
    create_sandbox(declared, "web")
    lines = f"one: cp /etc/passwd {tmp_path}/one\ntwo: cp /dev/null {tmp_path}/two\n"
    said = launch("fork_and_test", fork_variants=lines, fork_test=f"stat -c %s {tmp_path}/$(ls {tmp_path} | grep one)")
    assert re.search("web continues from web-try-(one|two)", said), said


# --- hosts -----------------------------------------------------------------------------------------------------------


class Host:
    """The directory of an installation; both kinds of hosts use the same program."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.network = root / kind, session.network()
        self.root.mkdir(parents=True)
        self.socket = self.root / "gw.sock"
        self.gateway_config = {"host": {"cache_root": str(session.cache_dir())}, "network": {**self.network, "pool": 1}}
        self.variables: dict[str, Any] = {
            "gateway_install_dir": str(root / "install"),
            "gateway_link_dir": str(root / "bin"),
            "gateway_config_dir": str(self.root / "etc"),
            "gateway_state_root": str(self.root / "state"),
            "gateway_socket": str(self.socket),
            "gateway_socket_group": "",
            "gateway_supervisor": "none",
            "gateway_log_file": str(self.root / "gateway.log"),
            "gateway_pid_file": str(self.root / "gateway.pid"),
        }

    def expected_answers(self, route: str) -> Any:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://gateway") as client:
            return client.get(route).raise_for_status().json()

    def config(self) -> dict[str, Any]:
        return tomllib.loads((self.root / "etc" / "config.toml").read_text())

    def remove(self, role: str, **options: Any) -> None:
        """``options``: options of the role gateway; ``inside``: see ``play``."""
        inside = options.pop("inside", ())
        for each in ("gateway", role):
            absent = {f"{each}_state": "absent", f"{each}_remove_data": True}
            done = play(each, {**self.variables, **options, **absent}, into=self.root, inside=inside)
            assert not done.failed, done.output


@pytest.fixture(scope="module")
def root(need_root: None) -> Iterator[Path]:
    path = session.run_dir() / "install"
    (path / "bin").mkdir(parents=True)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def linux(root: Path) -> Iterator[Host]:
    host = Host(root, "kvm_xfs")
    host.variables |= {
        "kvm_xfs_host_state_root": str(host.root / "state"),
        "kvm_xfs_host_min_free_mb": 100,
        "kvm_xfs_host_fstab": False,
        "kvm_xfs_host_sysctl_file": str(host.root / "sysctl.conf"),
        "kvm_xfs_host_facts_dir": str(host.root / "facts"),
        "kvm_xfs_host_accelerator_override": "tcg",
    }
    yield host
    host.remove("kvm_xfs_host")


def test_the_job_for_a_kvm_host(linux: Host, launch: Launch, tmp_path: Path) -> None:
    """The play of docs/recipes.md installs the host. The job with the same answers then changes nothing."""
    inventory = tmp_path / "hosts.yml"
    here = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    inventory.write_text(json.dumps({"sandbox_hosts": {"hosts": {"here": here}}}))
    player = Player(tmp_path, inventory=str(inventory))
    page = plays_by_playbook()["grove.sandbox.install_host"]["vars"]
    told = {"install_gateway_config": {**page["install_gateway_config"], **linux.gateway_config}}
    size = {"kvm_xfs_host_loop_size_mb": 2048}
    options = {**linux.variables, **told, **size}
    check_refusal(player.page("install_host", **options, gateway_config={}), "in install_gateway_config")
    foretold = player.page("install_host", "--check", **options)
    assert check_success(foretold) and foretold.changed > 3 and not (linux.root / "state").exists()
    check_success(player.page("install_host", **options))
    assert linux.expected_answers("/health")["status"] == "ok"
    config = linux.config()
    assert config["kvm_xfs"] == {"accelerator": "tcg"} and config["limits"] == {"sandboxes": 50}
    assert changed(launch("install_host", **linux.variables, **told, **size)) == 0


@pytest.fixture
def freebsd(linux: Host, root: Path, tmp_path: Path) -> Iterator[tuple[Host, tuple[str, ...]]]:
    """A host whose commands are doubles, and the command prefix that enters it. It uses the other host's program."""
    with pools.pool(f"t{session.run_id()}i", session.run_dir()) as pool, shim_in(tmp_path) as shim:
        host = Host(root, "jail_zfs")
        path = f"{shim.environ['PATH']}:{Path(sys.executable).parent}"
        inside = ("/usr/bin/nsenter", f"--net=/proc/{shim.space}/ns/net", "/usr/bin/env", f"PATH={path}")
        inside += (f"FREEBSD_SHIM_STATE={shim.state}",)
        host.variables |= {
            "jail_zfs_host_dataset": f"{pool.name}/sandboxes",
            **{f"jail_zfs_host_{name}": value for name, value in host.network.items()},
            "jail_zfs_host_pf_conf": str(host.root / "pf.conf"),
            "jail_zfs_host_loader_conf": str(host.root / "loader.conf"),
            "jail_zfs_host_sysctl_conf": str(host.root / "sysctl.conf"),
        }
        yield host, inside
        host.remove("jail_zfs_host", inside=inside, gateway_install_dir=str(host.root / "none"), gateway_link_dir="")


def test_the_job_for_a_jail_host(freebsd: tuple[Host, tuple[str, ...]], launch: Launch) -> None:
    """Jails on ZFS. Needs the previous test, because packages cannot be fetched inside the environment of the
    doubles."""
    host, inside = freebsd
    cache = {"install_gateway_config": {"host": {"cache_root": str(session.cache_dir())}, "network": {"pool": 1}}}
    options = {**host.variables, **cache, "install_kind": "jail_zfs"}
    launch("install_host", inside=inside, **options)
    assert host.expected_answers("/health")["status"] == "ok"
    config = host.config()
    assert config["host"]["kind"] == "jail_zfs" and config["network"] == {**host.network, "pool": 1}
    assert config["jail_zfs"] == {"dataset": host.variables["jail_zfs_host_dataset"]}
