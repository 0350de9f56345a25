"""Test that the names of task files depend on neither the location of the checkout nor links, and are unique."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from ansible import constants as C
from ansible_collections.grove.sandbox.plugins.plugin_utils._task_path import make_portable_path

from tests.collection.runner import Target

ROLE_FILE = "tasks/main.yml"


@pytest.fixture
def shared_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory outside the checkouts, with the roles path and a collection."""
    for name in ("roles/mk", "vendor/mk", "vendor/other", "linked"):
        (tmp_path / "shared" / name / "tasks").mkdir(parents=True)
    (tmp_path / "shared" / "roles" / "alias").symlink_to(tmp_path / "shared" / "linked")
    monkeypatch.setattr(C, "DEFAULT_ROLES_PATH", [str(tmp_path / "shared" / name) for name in ("roles", "vendor")])
    package = ModuleType("ansible_collections.some.tools")
    package.__path__ = [str(tmp_path / "shared" / "ansible_collections/some/tools")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return tmp_path / "shared"


@pytest.fixture(params=["one", "deep/er/two", "link"])
def checkout(tmp_path: Path, shared_directory: Path, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path / str(request.param)
    if request.param == "link":
        (tmp_path / "target" / "of").mkdir(parents=True)
        directory.symlink_to(tmp_path / "target" / "of")
    (directory / "plays" / "tasks").mkdir(parents=True)
    (directory / "tasks").mkdir()
    return directory


def get_role_file_name(checkout: Path, role: Path, name: str = "") -> str:
    """Return the name of a role's file. Ansible resolves the links in the paths of roles."""
    role_path = role.resolve()
    return make_portable_path(
        str(role_path / ROLE_FILE), [str(checkout / "plays/site.yml")], name or role.name, str(role_path)
    )


def test_names_do_not_depend_on_the_checkout(checkout: Path, shared_directory: Path) -> None:
    playbooks = [str(checkout / "plays/site.yml")]
    assert make_portable_path(playbooks[0], playbooks) == "site.yml"
    assert make_portable_path(str(checkout / "plays/tasks/a.yml"), playbooks) == "tasks/a.yml"
    assert make_portable_path(str((checkout / "plays").resolve() / "tasks/a.yml"), playbooks) == "tasks/a.yml"
    assert make_portable_path(str(checkout / "tasks/a.yml"), playbooks) == "../tasks/a.yml"
    assert make_portable_path("/etc/plays/a.yml", playbooks) == "/etc/plays/a.yml"
    assert get_role_file_name(checkout, checkout / "plays/roles/mk") == f"roles/mk/{ROLE_FILE}"
    assert get_role_file_name(checkout, shared_directory / "roles/mk") == f"role://mk/{ROLE_FILE}"
    assert get_role_file_name(checkout, shared_directory / "vendor/other") == f"role://other/{ROLE_FILE}"
    assert get_role_file_name(checkout, shared_directory / "roles/alias") == f"role://alias/{ROLE_FILE}"
    collection_file = shared_directory / "ansible_collections/some/tools/roles/mk/tasks/main.yml"
    assert (
        make_portable_path(str(collection_file), playbooks, "mk") == "collection://some.tools/roles/mk/tasks/main.yml"
    )


def test_another_role_of_the_same_name_has_a_different_name(checkout: Path, shared_directory: Path) -> None:
    name_below_vendor = get_role_file_name(checkout, shared_directory / "vendor/mk")
    assert name_below_vendor.endswith(f"shared/vendor/mk/{ROLE_FILE}") and "role:" not in name_below_vendor


def test_a_link_to_a_file_has_its_own_name(checkout: Path) -> None:
    """A mounted Kubernetes ConfigMap contains links to files in a directory whose name contains the time."""
    playbook = checkout / "plays/site.yml"
    playbook.symlink_to("tasks/2026_11_25.yml")
    assert make_portable_path(str(playbook), [str(playbook)]) == "site.yml"


def test_playbooks_of_one_run_have_different_names(checkout: Path, shared_directory: Path) -> None:
    paths = [str(checkout / name) for name in ("plays/site.yml", "tasks/site.yml")]
    assert [make_portable_path(path, paths) for path in paths] == ["plays/site.yml", "tasks/site.yml"]
    paths = [paths[0], str(shared_directory / "ansible_collections/some/tools/playbooks/site.yml")]
    names = ["site.yml", "collection://some.tools/playbooks/site.yml"]
    assert [make_portable_path(path, paths) for path in paths] == names
    assert make_portable_path(paths[1], paths[1:]) == "site.yml"


def test_paths_can_be_relative(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    assert make_portable_path(str(checkout / "plays/site.yml"), ["plays/site.yml"]) == "site.yml"
    assert make_portable_path(str(checkout / "plays/site.yml"), []) == "plays/site.yml"


def test_each_task_of_a_test_playbook_has_its_own_line(tmp_path: Path) -> None:
    """Otherwise, no test shows that a plan distinguishes tasks by their lines."""
    task = {"ansible.builtin.debug": {"msg": "the same"}}
    Target("unix:///run/gateway.sock", tmp_path).write_playbook("play.yml", {"tasks": [task, task]})
    text = (tmp_path / "play.yml").read_text()
    assert text.startswith("---\n"), "Ansible would read it as JSON, without lines"
    (play,) = yaml.compose(text).value
    first_task, second_task = next(value.value for key, value in play.value if key.value == "tasks")
    assert first_task.start_mark.line < second_task.start_mark.line
