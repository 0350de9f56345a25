"""Plans of ``sandbox_template`` for a template whose recipe is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Plan, diff, predict
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import RECIPE_WORDS, template_shape


def plan(answer: dict[str, Any], **options: Any) -> Plan:
    want = _template.desired(parameters(**options))
    return _template.plan(want, _template.Current({"web": template_shape(answer)}))


def parameters(**options: Any) -> dict[str, Any]:
    return {**{name: option.get("default") for name, option in _template.ARGUMENTS.items()}, "name": ["web"], **options}


def template(**fields: Any) -> dict[str, Any]:
    """The gateway's answer for a template of the default recipe."""
    recipe = {field: parameters()[option] for option, field in RECIPE_WORDS.items()}
    return {"templateID": "0" * 12, "names": ["web"], "buildStatus": "ready", "recipe": recipe, **fields}


@pytest.mark.parametrize("fields", [{"outdated": False}, {"outdated": None}, {}])
def test_a_template_that_is_not_known_to_be_outdated_stays(fields: dict[str, Any]) -> None:
    assert plan(template(**fields)).actions == ()


def test_an_outdated_template_is_built_again_and_the_diff_says_why() -> None:
    (action,) = plan(template(outdated=True)).actions
    assert action.verb == "build"
    change = diff([action])
    before, after = change["before"]["web"], change["after"]["web"]
    assert {key for key in before if before[key] != after[key]} == {"outdated"}
    assert (before["outdated"], after["outdated"]) == (True, False)
    assert predict({}, [action])["web"]["outdated"] is False


def test_rebuild_outdated_false_keeps_it_and_a_changed_recipe_does_not() -> None:
    assert plan(template(outdated=True), rebuild_outdated=False).actions == ()
    (action,) = plan(template(outdated=True), rebuild_outdated=False, packages=["curl"]).actions
    assert action.verb == "build"


def test_the_removal_of_an_outdated_template_shows_that_it_is_outdated() -> None:
    (action,) = plan(template(outdated=True), state="absent", when_unused=True).actions
    assert action.verb == "remove" and diff([action])["before"]["web"]["outdated"] is True


def test_a_template_being_built_is_not_waited_for_twice() -> None:
    building = template(buildStatus="building", outdated=False)
    assert plan(building, wait_timeout=0).actions == ()
