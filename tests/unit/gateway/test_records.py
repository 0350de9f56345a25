"""Records with any contents survive serialization, and names and recipes are validated."""

from __future__ import annotations

import string
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox_gateway.errors import Invalid
from sandbox_gateway.recipes import Recipe, compute_source_digest
from sandbox_gateway.records import NAME_PATTERN, Mount, Resources, Sandbox, Snapshot, check_name, compact, now

texts = st.text(max_size=40)


@given(metadata=st.dictionaries(texts, texts, max_size=5), env=st.dictionaries(texts, texts, max_size=5))
def test_a_sandbox_record_survives_a_round_trip(metadata: dict[str, str], env: dict[str, str]) -> None:
    sandbox = Sandbox(name="a", metadata=metadata, env=env)
    assert Sandbox.model_validate_json(sandbox.model_dump_json()) == sandbox


def test_the_timeout_of_an_older_record_is_converted() -> None:
    assert Sandbox.model_validate({"name": "a", "life": 60.0}).timeout == 60
    assert "life" not in Sandbox(name="a", timeout=60).model_dump()


@given(name=st.from_regex(NAME_PATTERN, fullmatch=True))
def test_every_valid_name_gives_a_valid_host_name(name: str) -> None:
    assert check_name(name) == name
    hostname = Sandbox(name=name).hostname
    assert 1 <= len(hostname) <= 63 and hostname.replace("-", "a").isalnum() and not hostname.startswith("-")


FIRST_CHARACTERS = string.ascii_letters + string.digits
OTHER_CHARACTERS = FIRST_CHARACTERS + "_.-"


def follows_name_rule(text: str) -> bool:
    """Return whether a name is valid, without using the regular expression under test."""
    return 1 <= len(text) <= 64 and text[0] in FIRST_CHARACTERS and all(letter in OTHER_CHARACTERS for letter in text)


@given(
    name=st.text()
    | st.text(OTHER_CHARACTERS, max_size=70)
    | st.text(OTHER_CHARACTERS, min_size=1).map(lambda text: text + "\n")
)
@example("")
@example("a" * 64)
@example("a" * 65)
@example("a\n")
@example(".a")
@example("-a")
@example("_a")
@example("ä")
@example("a/b")
@example("\uff11")
@example("a" * 10_000)
def test_exactly_the_valid_names_are_accepted(name: str) -> None:
    if follows_name_rule(name):
        assert check_name(name) == name
    else:
        with pytest.raises(ValueError, match="is not allowed: use 1 to 64 letters") as error_info:
            check_name(name)
        assert len(str(error_info.value)) < 1000


def test_a_refused_name_is_shown_up_to_eighty_characters() -> None:
    for name, expected in (("-" * 80, "-" * 80), ("-" * 81, "-" * 77 + "...")):
        with pytest.raises(ValueError) as error_info:
            check_name(name)
        assert str(error_info.value) == (
            f"the name '{expected}' is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
            "starting with a letter or digit"
        )


def test_the_current_time_is_in_utc() -> None:
    assert now().utcoffset() == timedelta(0)


def test_a_recipes_digest_ignores_the_order_of_packages() -> None:
    recipe = Recipe(packages=["curl", "git"])
    assert recipe.compute_digest() == Recipe(packages=["git", "curl", "git"]).compute_digest()
    assert recipe.compute_digest() != Recipe(packages=["curl"]).compute_digest()
    assert recipe.compute_digest("agent-1") != recipe.compute_digest("agent-2")


@pytest.mark.parametrize("package", ["", "-o", "a b", "../x", "x;y", "UPPER"])
def test_invalid_packages_are_refused(package: str) -> None:
    with pytest.raises(ValidationError, match="Debian package"):
        Recipe(packages=[package])


def test_a_root_file_system_needs_an_existing_path() -> None:
    with pytest.raises(ValidationError, match="absolute path"):
        Recipe.model_validate({"source": "rootfs", "path": "relative"})
    with pytest.raises(Invalid, match="cannot be read"):
        compute_source_digest(Recipe.model_validate({"source": "rootfs", "path": "/nowhere/at/all"}))


def test_a_compact_record_has_the_same_values() -> None:
    sandbox = Sandbox(
        name="one",
        resources=Resources(cpus=2, memory_mb=128, disk_mb=64),
        mounts=[Mount(volume="0" * 12, path="/data")],
        metadata={"a": "b"},
    )
    values_before = sandbox.model_dump()
    assert compact(sandbox) is sandbox and sandbox.model_dump() == values_before
    renamed_sandbox = sandbox.model_copy(update={"name": "two"}, deep=True)
    assert renamed_sandbox.model_dump() == {**values_before, "name": "two"} and sandbox.name == "one"


def test_compact_records_share_resources_that_cannot_change() -> None:
    first_record, second_record = (compact(Snapshot(resources=Resources(cpus=3))) for _ in range(2))
    assert first_record.resources is second_record.resources and first_record.resources == Resources(cpus=3)
    with pytest.raises(ValidationError):
        first_record.resources.cpus = 4  # type: ignore[misc]
    assert compact(Snapshot()).resources == Resources()


def test_a_compact_record_keeps_the_fields_of_a_newer_release() -> None:
    resources = {"cpus": 1, "memory_mb": 256, "disk_mb": 2048, "gpus": 1}
    record = compact(Snapshot.model_validate({"colour": "blue", "resources": resources}))
    saved_fields = record.model_dump()
    assert saved_fields["colour"] == "blue" and saved_fields["resources"] == resources
