"""The small helpers of the plans: spelling, names, diffs, addresses, secrets."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Address, Client, segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, join
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    Action,
    Change,
    aside,
    checked_names,
    diff,
    networks,
    predict,
    succeeded,
    words,
)
from ansible_collections.grove.sandbox.plugins.module_utils._run import HIDDEN, hide, secrets_of
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import moment

from tests.collection.predictions import CASES, THINGS, required_items
from tests.support.session import REPOSITORY


def test_equal_networks_have_one_spelling() -> None:
    assert networks(["10.1.2.3/8", "10.0.0.1", "10.0.0.0/8", "FD00::1"]) == ["10.0.0.0/8", "10.0.0.1/32", "fd00::1/128"]
    assert networks(["example.org"]) == ["example.org"]


def test_metadata_values_are_strings() -> None:
    assert words({"a": 1, "b": True, "c": "x", "d": 1.5}, "metadata") == {"a": "1", "b": "true", "c": "x", "d": "1.5"}
    assert words(None, "metadata") is None
    with pytest.raises(Failure, match=r"metadata\.a must be"):
        words({"a": {}}, "metadata")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "ä", "n" * 65])
def test_invalid_names(name: str) -> None:
    with pytest.raises(Failure, match="is not allowed"):
        checked_names([name], "sandbox")


def test_the_temporary_name_is_valid() -> None:
    for name in ("a", "n" * 64):
        assert checked_names([aside(name, "0123456789ab")], "sandbox")
    assert aside("a", "0123456789ab") != aside("a", "ffffffffffff")


def test_a_diff_joins_the_first_before_and_the_last_after() -> None:
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


def test_a_prediction_contains_no_ids() -> None:
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
    ("url", "local"),
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
def test_addresses(url: str, local: bool) -> None:
    assert Address(url).local is local


@pytest.mark.parametrize(
    "url", ["gateway:80", "unix://relative", "ftp://x", "http://", "http://x:port", "http://me:secret@x", "/run/x.sock"]
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(Failure, match="gateway_url") as caught:
        Address(url)
    assert "secret" not in caught.value.message


def test_a_key_with_a_line_end_is_refused_without_showing_it() -> None:
    with pytest.raises(Failure, match="line end") as caught:
        Client("http://x", "secret-key\n")
    assert "secret" not in caught.value.message


def test_path_steps() -> None:
    assert segment("a/../b?c") == "a%2F..%2Fb%3Fc"


def test_secrets_are_masked() -> None:
    params: dict[str, Any] = {"gateway_token": "0123456789", "env": {"SHORT": "1", "LONG": "very-secret"}}
    result = hide({"msg": "0123456789 1 very-secret", "list": ["very-secret!"], "n": 1}, secrets_of(params))
    assert result == {"msg": f"{HIDDEN} 1 {HIDDEN}", "list": [f"{HIDDEN}!"], "n": 1}


def test_several_failures_become_one() -> None:
    one, two = Failure("a is bad", "conflict", blockers=["x"]), Failure("b is bad", "in_use", blockers=["y", "x"])
    assert join({"a": one}, 5) is one
    both = join({"a": one, "b": two}, 5)
    assert both.message == "2 of 5 failed: a is bad; b is bad"
    assert both.kind == "conflict" and both.blockers == ["x", "y"]


def test_times() -> None:
    assert moment("9999-01-01T00:00:00Z") is None
    assert moment("") is None
    found = moment("2026-11-21T22:17:43.123456Z")
    assert found is not None and found.isoformat() == "2026-11-21T22:17:43+00:00"


def test_the_diff_of_a_replaced_object_matches_its_successor() -> None:
    assert succeeded({"name": "a", "memory_mb": 256, "timeout": -1}, {"name": "a", "memory_mb": 512}) == {
        "name": "a",
        "memory_mb": 256,
    }


def test_the_predictions_cover_every_state_and_option() -> None:
    modules = {path.stem for path in (REPOSITORY / "plugins" / "modules").glob("*.py")}
    assert modules == set(THINGS)
    found = {each for case in CASES for each in case.covered_items()}
    assert not required_items() - found, "add a case to tests/collection/predictions.py for each of these"
    assert len({(case.module, case.title) for case in CASES}) == len(CASES)
