"""Test the inventory plugin's filters, host names, groups and variables without running Ansible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.plugin_utils import _gateways, _inventory
from ansible_collections.grove.sandbox.plugins.plugin_utils._gateways import Gateway

ALL_GROUPINGS = list(_inventory.GROUPINGS)
MALICIOUS_EXPRESSION = "{{ lookup('ansible.builtin.pipe', 'touch /tmp/evil') }}"


def make_sandbox(**fields: Any) -> dict[str, Any]:
    return {
        "id": "0123456789ab",
        "name": "web",
        "state": "running",
        "template": "base",
        "template_id": "aaaaaaaaaaaa",
        "head": "golden",
        "metadata": {"team": "blue"},
        "backend": "kvm_xfs",
        **fields,
    }


@pytest.mark.parametrize(
    ("filters", "is_selected"),
    [
        ({}, True),
        ({"state": "running"}, True),
        ({"state": ["paused", "running"]}, True),
        ({"state": "paused"}, False),
        ({"template": "base"}, True),
        ({"template": ["other", "aaaaaaaaaaaa"]}, True),
        ({"template": "Base"}, False),
        ({"name": ["db", "we*"]}, True),
        ({"name": "we"}, False),
        ({"metadata": {"team": "blue"}}, True),
        ({"metadata": {"team": ["red", "b*"]}}, True),
        ({"metadata": {"team": "red"}}, False),
        ({"metadata": {"owner": "*"}}, False),
        ({"metadata": {"team": "blue", "owner": "me"}}, False),
        ({"name": "web", "state": "paused"}, False),
        ({"name": None}, True),
    ],
)
def test_filters_select_sandboxes(filters: dict[str, Any], is_selected: bool) -> None:
    assert _inventory.matches_filters(make_sandbox(), filters) is is_selected


def test_numbers_in_filters_match_text() -> None:
    assert _inventory.matches_filters(make_sandbox(metadata={"run": "7"}), {"metadata": {"run": 7}})


@pytest.mark.parametrize(
    "name",
    ["all", "ungrouped", "localhost", "127.0.0.1", "::1", MALICIOUS_EXPRESSION, "a b", "", "-x", "a\nb", "web[1:3]"],
)
def test_names_with_a_special_meaning_are_replaced_by_ids(name: str) -> None:
    assert _inventory.make_host_name(make_sandbox(name=name), "name", "east") == "0123456789ab"
    assert _inventory.make_host_name(make_sandbox(name=name), "name_gateway", "east") == "0123456789ab.east"


def test_host_names_follow_the_hostname_option() -> None:
    assert _inventory.make_host_name(make_sandbox(), "name", "east") == "web"
    assert _inventory.make_host_name(make_sandbox(), "id", "east") == "0123456789ab"
    assert _inventory.make_host_name(make_sandbox(), "name_gateway", "east") == "web.east"
    assert (
        _inventory.make_host_name(make_sandbox(name="state_running"), "name", "east", {"state_running"})
        == "0123456789ab"
    )


def test_groups_follow_the_requested_groupings() -> None:
    group_names = _inventory.list_groups(make_sandbox(metadata={"team": "blue", "empty": ""}), "east", ALL_GROUPINGS)
    assert group_names == [
        "template_base",
        "head_golden",
        "state_running",
        "metadata_team_blue",
        "metadata_empty",
        "gateway_east",
    ]
    assert _inventory.list_groups(make_sandbox(), "east", ["state"]) == ["state_running"]
    assert _inventory.list_groups(make_sandbox(head=""), "east", ["head"]) == []


def test_variables_contain_no_key() -> None:
    gateway = Gateway(
        "https://a.example", token="very-secret-key", ca_path="/ca.pem", validate_certs=False, name="east"
    )
    variables = _inventory.make_host_variables(make_sandbox(), gateway, "")
    assert variables["ansible_host"] == "0123456789ab" and variables["ansible_connection"] == "grove.sandbox.sandbox"
    assert variables["ansible_sandbox_gateway_url"] == "https://a.example"
    assert variables["ansible_sandbox_ca_path"] == "/ca.pem" and variables["ansible_sandbox_validate_certs"] is False
    assert variables["ansible_python_interpreter"] == "/usr/bin/python3"
    assert variables["grove_sandbox"]["gateway"] == "east"
    assert "very-secret-key" not in str(variables)
    assert "ansible_python_interpreter" not in _inventory.make_host_variables(
        make_sandbox(backend="jail_zfs"), gateway, ""
    )
    assert _inventory.make_host_variables(make_sandbox(), gateway, "/opt/py")["ansible_python_interpreter"] == "/opt/py"
    default_variables = _inventory.make_host_variables(make_sandbox(), Gateway("unix:///x", token_file="/key"), "")
    assert default_variables["ansible_sandbox_gateway_token_file"] == "/key"
    assert not {"ansible_sandbox_ca_path", "ansible_sandbox_validate_certs"} & default_variables.keys()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"url": "x", "tokn": "y"}, r"unknown keys \(tokn\)"),
        ("east", "must be a mapping"),
        (["a"], "must be a mapping"),
    ],
)
def test_invalid_gateway_entries_are_refused(entry: Any, message: str) -> None:
    with pytest.raises(Failure, match=message):
        _inventory.check_keys(entry, _inventory.GATEWAY_KEYS, "gateway 1 of 1")


def test_keys_are_read_from_options_and_files(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("from-the-file\n")
    assert Gateway("x", token="own", token_file=str(key_file)).read_key() == "own"
    assert Gateway("x", token_file=str(key_file)).read_key() == "from-the-file"
    assert Gateway("x").read_key() == ""
    with pytest.raises(Failure, match="cannot be read: No such file"):
        Gateway("x", token_file=str(tmp_path / "none")).read_key()
    key_file.write_bytes(b"\xff\xfe")
    with pytest.raises(Failure, match="not a single line of plain text"):
        Gateway("x", token_file=str(key_file)).read_key()


def test_gateways_are_stored_by_sandbox_and_url() -> None:
    first_gateway, second_gateway = Gateway("http://one"), Gateway("http://two")
    _gateways.store_gateway("feedfeedfeed", first_gateway)
    _gateways.store_gateway("feedfeedfeed", second_gateway)
    assert _gateways.find_gateway("feedfeedfeed", "http://one") is first_gateway
    assert _gateways.find_gateway("feedfeedfeed", "http://two") is second_gateway
    assert _gateways.find_gateway("feedfeedfeed", "http://three") is None
    assert _gateways.find_gateway("web", "http://one") is None
