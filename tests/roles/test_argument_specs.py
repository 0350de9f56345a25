"""Each role's argument specification names all that can be set, with what it is by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import session

ROLES = sorted((session.REPOSITORY / "roles").iterdir())


def load(role: Path, name: str) -> Any:
    return yaml.safe_load((role / name).read_text())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_names_every_default_and_nothing_else(role: Path) -> None:
    options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    defaults = load(role, "defaults/main.yml")
    # What has no default is required, or its absence means something.
    without = {name for name, option in options.items() if "default" not in option}
    assert set(defaults) <= set(options)
    assert set(options) - set(defaults) <= without
    assert all(name.startswith(f"{role.name}_") for name in options)
    for name, value in defaults.items():
        # A template (another path on FreeBSD) comes to what the specification says, on Linux.
        if not (isinstance(value, str) and "{{" in value):
            assert options[name].get("default", "" if value == "" else None) == value, name


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_says_what_each_is(role: Path) -> None:
    main = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]
    assert main["short_description"] and main["description"] and main["author"]

    def check(options: dict[str, Any], within: str) -> None:
        for name, option in options.items():
            assert option.get("description") and option.get("type"), f"{within}{name}"
            assert option["type"] != "list" or option.get("elements"), f"{within}{name}"
            check(option.get("options", {}), f"{within}{name}.")

    check(main["options"], f"{role.name}: ")


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_is_used(role: Path) -> None:
    texts = [path.read_text() for path in role.rglob("*") if path.suffix in (".yml", ".j2")]
    for name in load(role, "defaults/main.yml"):
        assert sum(text.count(name) for text in texts) > 2, f"{name} is declared, and does nothing"
