"""Test the plans of ``sandbox_template`` for a template that exists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._build_context import Archive
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Plan, diff, predict
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import RECIPE_FIELDS, make_template_shape


def make_plan(template: dict[str, Any], **options: Any) -> Plan:
    desired_state = _template.parse_desired_state(make_parameters(**options))
    return _template.plan(desired_state, _template.CurrentState({"web": make_template_shape(template)}))


def make_parameters(**options: Any) -> dict[str, Any]:
    return {**{name: option.get("default") for name, option in _template.ARGUMENTS.items()}, "name": ["web"], **options}


def make_template(**fields: Any) -> dict[str, Any]:
    """Return the gateway's description of a template with the default recipe. ``fields``: additional fields."""
    options = _template.parse_desired_state(make_parameters()).recipe
    recipe = {field: options[option] for option, field in RECIPE_FIELDS.items()}
    return {"templateID": "0" * 12, "names": ["web"], "buildStatus": "ready", "recipe": recipe, **fields}


@pytest.mark.parametrize("fields", [{"outdated": False}, {"outdated": None}, {}])
def test_a_template_not_known_to_be_outdated_is_kept(fields: dict[str, Any]) -> None:
    assert make_plan(make_template(**fields)).actions == ()


def test_a_template_of_a_gateway_without_image_support_is_compared() -> None:
    template = make_template()
    del template["recipe"]["image"]
    assert make_plan(template).actions == ()
    (action,) = make_plan(template, image="app:1").actions
    assert (action.request["body"]["from"], action.request["body"]["image"]) == ("image", "app:1")


def test_a_gateway_that_does_not_know_setup_network_builds_and_compares_templates() -> None:
    template = make_template()
    del template["recipe"]["setupNetwork"]
    assert make_plan(template).actions == ()
    (action,) = make_plan(template, image="app:1").actions
    assert "setupNetwork" not in action.request["body"]
    (action,) = make_plan(template, setup_network=False).actions
    assert action.request["body"]["setupNetwork"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "registry.test/app:1", "registry_username": "reader"}, "the login .* is incomplete"),
        ({"image": "registry.test/app:1", "registry_password": "hunter2"}, "the login .* is incomplete"),
        ({"registry_username": "reader", "registry_password": "hunter2"}, "valid only with image"),
    ],
)
def test_an_incomplete_or_useless_login_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Failure, match=message) as error_info:
        _template.parse_desired_state(make_parameters(**options))
    assert "hunter2" not in error_info.value.message


def test_empty_variables_are_no_login() -> None:
    options = {"image": "registry.test/app:1", "registry_username": "", "registry_password": ""}
    (action,) = make_plan(make_template(), **options).actions
    assert action.verb == "build" and "login" not in action.request


def test_an_outdated_template_is_rebuilt_and_the_diff_shows_why() -> None:
    (action,) = make_plan(make_template(outdated=True)).actions
    assert action.verb == "build"
    template_diff = diff([action])
    state_before, state_after = template_diff["before"]["web"], template_diff["after"]["web"]
    assert {key for key in state_before if state_before[key] != state_after[key]} == {"outdated"}
    assert (state_before["outdated"], state_after["outdated"]) == (True, False)
    assert predict({}, [action])["web"]["outdated"] is False


def test_rebuild_outdated_false_rebuilds_only_for_a_changed_recipe() -> None:
    assert make_plan(make_template(outdated=True), rebuild_outdated=False).actions == ()
    (action,) = make_plan(make_template(outdated=True), rebuild_outdated=False, packages=["curl"]).actions
    assert action.verb == "build"


def test_removing_an_outdated_template_shows_outdated_in_the_diff() -> None:
    (action,) = make_plan(make_template(outdated=True), state="absent", when_unused=True).actions
    assert action.verb == "remove" and diff([action])["before"]["web"]["outdated"] is True


def test_a_template_being_built_is_not_built_again() -> None:
    template_being_built = make_template(buildStatus="building", outdated=False)
    assert make_plan(template_being_built, wait_timeout=0).actions == ()


def test_a_different_prewarm_count_changes_only_the_count() -> None:
    current_template = make_template(prewarm={"ready": 0, "target": 1}, memory="incremental")
    assert make_plan(current_template).actions == make_plan(current_template, prewarm=1).actions == ()
    (action,) = make_plan(current_template, prewarm=3).actions
    assert (action.verb, action.request["count"]) == ("prewarm", 3)
    template_diff = diff([action])
    assert {
        key for key, value in template_diff["before"]["web"].items() if template_diff["after"]["web"][key] != value
    } == {"prewarm"}
    shape = make_template_shape(current_template)
    assert predict({"web": shape}, [action])["web"] == {**shape, "prewarm": 3}


def test_a_template_without_memory_is_not_prewarmed() -> None:
    current_template = make_template(prewarm={"ready": 0, "target": 0}, memory="none")
    assert make_plan(current_template, prewarm=0).actions == ()
    assert make_plan(current_template, prewarm=1).failures["web"].kind == "unsupported"


def test_a_rebuild_uses_the_prewarm_count_of_the_task() -> None:
    current_template = make_template(prewarm={"ready": 2, "target": 2}, memory="incremental")
    (action,) = make_plan(current_template, packages=["curl"]).actions
    assert action.verb == "build" and "prewarm" not in action.request["body"]
    assert diff([action])["after"]["web"]["prewarm"] == 0
    (action,) = make_plan(current_template, packages=["curl"], prewarm=2).actions
    assert action.request["body"]["prewarm"] == diff([action])["after"]["web"]["prewarm"] == 2


def test_an_archive_that_several_templates_need_is_uploaded_once() -> None:
    uploads: list[str] = []
    client = SimpleNamespace(
        is_planning=False, uploaded_digests=set(), put_file=lambda path, _pieces, _size: uploads.append(path)
    )
    archives = [Archive("app", digest, 0, ()) for digest in ("1" * 64, "1" * 64, "2" * 64)]
    for archive in archives:
        _template._upload(client, archive)  # type: ignore[arg-type]
    assert uploads == [f"/build-files/{digit * 64}" for digit in "12"]
