"""Test helper functions of the modules: names, values, diffs, addresses and secrets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Address, Client, quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, join_failures
from ansible_collections.grove.sandbox.plugins.module_utils._module import redact_options
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    Action,
    Change,
    diff,
    keep_common_keys,
    make_temporary_name,
    normalize_networks,
    predict,
    stringify_values,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._run import MASK, find_secrets, mask_secrets
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import parse_time

from tests.collection.predictions import CASES, RESOURCE_KINDS, list_required_items
from tests.support.session import REPOSITORY


def test_equal_networks_are_normalized_to_the_same_text() -> None:
    assert normalize_networks(["10.1.2.3/8", "10.0.0.1", "10.0.0.0/8", "FD00::1"]) == [
        "10.0.0.0/8",
        "10.0.0.1/32",
        "fd00::1/128",
    ]
    assert normalize_networks(["example.org"]) == ["example.org"]


def test_metadata_values_become_strings() -> None:
    assert stringify_values({"a": 1, "b": True, "c": "x", "d": 1.5}, "metadata") == {
        "a": "1",
        "b": "true",
        "c": "x",
        "d": "1.5",
    }
    assert stringify_values(None, "metadata") is None
    with pytest.raises(Failure, match=r"metadata\.a must be"):
        stringify_values({"a": {}}, "metadata")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "n" * 65])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(Failure, match="is not allowed"):
        validate_names([name], "sandbox")


def test_the_temporary_name_is_valid() -> None:
    for name in ("a", "n" * 64):
        assert validate_names([make_temporary_name(name, "0123456789ab")], "sandbox")
    assert make_temporary_name("a", "0123456789ab") != make_temporary_name("a", "ffffffffffff")


def test_a_diff_shows_the_first_and_the_last_state() -> None:
    actions = [
        Action("resume", (Change("a", {"state": "paused"}, {"state": "running"}),)),
        Action("update", (Change("a", {"state": "running"}, {"state": "running", "metadata": {}}),)),
        Action("create", (Change("b", None, {"state": "running"}),)),
        Action("remove", (Change("c", {"state": "running"}, None),)),
    ]
    assert diff(actions) == {
        "before": {"a": {"state": "paused"}, "c": {"state": "running"}},
        "after": {"a": {"state": "running", "metadata": {}}, "b": {"state": "running"}},
    }


def test_predictions_contain_no_ids() -> None:
    shapes = {"a": {"id": "1", "state": "paused"}, "c": {"id": "3"}}
    actions = [
        Action("create", (Change("b", None, {"state": "running", "timeout": 5}),)),
        Action("replace", (Change("a", {}, {"state": "running"}),)),
        Action("remove", (Change("c", {}, None),)),
    ]
    result = predict(shapes, actions)
    assert set(result) == {"a", "b"}
    assert result["a"]["id"] is None and result["a"]["state"] == "running"
    assert result["b"]["id"] is None and "timeout" not in result["b"]


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("", True),
        ("unix:///run/x.sock", True),
        ("http://localhost:8000", True),
        ("http://127.3.2.1", True),
        ("http://[::1]:80", True),
        ("https://gateway.example.org:8443/below", False),
        ("http://192.0.2.7:1", False),
    ],
)
def test_local_addresses_are_detected(url: str, is_local: bool) -> None:
    assert Address(url).is_local is is_local


@pytest.mark.parametrize(
    "url", ["gateway:80", "unix://relative", "ftp://x", "http://", "http://x:port", "http://me:secret@x", "/run/x.sock"]
)
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(Failure, match="gateway_url") as error_info:
        Address(url)
    assert "secret" not in error_info.value.message


def test_a_key_with_a_line_break_is_refused_without_showing_it() -> None:
    with pytest.raises(Failure, match="line break") as error_info:
        Client("http://x", "secret-key\n")
    assert "secret" not in error_info.value.message


def test_references_are_quoted_in_paths() -> None:
    assert quote_segment("a@b?c") == "a%40b%3Fc"
    for ref in ("a/../b", "..", "."):
        with pytest.raises(Failure, match=f"'{re.escape(ref)}' is not a valid name or id: use the name or id of an"):
            quote_segment(ref)


def test_secrets_are_masked() -> None:
    env = {"SHORT": "1", "LONG": "very-secret"}
    params: dict[str, Any] = {"gateway_token": "0123456789", "registry_password": "registry-secret", "env": env}
    text = "0123456789 1 very-secret registry-secret"
    result = mask_secrets({"msg": text, "list": ["very-secret!"], "n": 1}, find_secrets(params))
    assert result == {"msg": f"{MASK} 1 {MASK} {MASK}", "list": [f"{MASK}!"], "n": 1}
    redacted_options = redact_options({**params, "registry_username": "reader"})
    assert "secret" not in str(redacted_options) and redacted_options["registry_username"] == "reader"


def test_failures_are_joined() -> None:
    first_failure, second_failure = (
        Failure("a is bad", "conflict", blockers=["x"]),
        Failure("b is bad", "in_use", blockers=["y", "x"]),
    )
    assert join_failures({"a": first_failure}, 5) is first_failure
    joined_failure = join_failures({"a": first_failure, "b": second_failure}, 5)
    assert joined_failure.message == "2 of 5 failed: a is bad; b is bad"
    assert joined_failure.kind == "conflict" and joined_failure.blockers == ["x", "y"]


def test_times_are_parsed_to_whole_seconds() -> None:
    assert parse_time("9999-01-01T00:00:00Z") is None
    assert parse_time("") is None
    parsed_time = parse_time("2026-11-21T22:17:43.123456Z")
    assert parsed_time is not None and parsed_time.isoformat() == "2026-11-21T22:17:43+00:00"


def test_the_diff_of_a_replacement_shows_only_common_keys() -> None:
    assert keep_common_keys({"name": "a", "memory_mb": 256, "timeout": -1}, {"name": "a", "memory_mb": 512}) == {
        "name": "a",
        "memory_mb": 256,
    }


def test_the_prediction_cases_cover_every_state_and_option() -> None:
    module_names = {path.stem for path in (REPOSITORY / "plugins" / "modules").glob("*.py")}
    assert module_names == set(RESOURCE_KINDS)
    covered_items = {each for case in CASES for each in case.list_covered_items()}
    assert not list_required_items() - covered_items, "add a case to tests/collection/predictions.py for each of these"
    assert len({(case.module, case.title) for case in CASES}) == len(CASES)
