"""Records survive being written down, whatever they hold; names and recipes are checked at the edge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandbox_gateway.errors import Invalid
from sandbox_gateway.recipes import Recipe, source_digest
from sandbox_gateway.records import NAME_PATTERN, Sandbox, Snapshot, check_name

texts = st.text(max_size=40)


@given(metadata=st.dictionaries(texts, texts, max_size=5), env=st.dictionaries(texts, texts, max_size=5))
def test_a_sandbox_s_record_is_read_as_it_was_written(metadata: dict[str, str], env: dict[str, str]) -> None:
    sandbox = Sandbox(name="a", metadata=metadata, env=env)
    assert Sandbox.model_validate_json(sandbox.model_dump_json()) == sandbox


def test_fields_of_a_newer_gateway_are_passed_over() -> None:
    assert Snapshot.model_validate({"names": ["a"], "of_the_future": 1}).names == ["a"]


@given(name=st.from_regex(NAME_PATTERN, fullmatch=True))
def test_every_name_of_the_pattern_is_allowed_and_makes_a_host_name(name: str) -> None:
    assert check_name(name) == name
    hostname = Sandbox(name=name).hostname
    assert 1 <= len(hostname) <= 63 and hostname.replace("-", "a").isalnum() and not hostname.startswith("-")


@given(name=st.text().filter(lambda text: not text.isascii() or not text.replace("-", "").isalnum()))
def test_what_is_refused_is_refused_in_a_short_sentence(name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        assert len(str(error)) < 300


def test_a_recipe_s_digest_is_of_what_it_says_not_how() -> None:
    one = Recipe(packages=["curl", "git"])
    assert one.digest() == Recipe(packages=["git", "curl", "git"]).digest()
    assert one.digest() != Recipe(packages=["curl"]).digest()
    assert one.digest("agent-1") != one.digest("agent-2")


@pytest.mark.parametrize("package", ["", "-o", "a b", "../x", "x;y", "UPPER"])
def test_what_is_no_package_is_refused(package: str) -> None:
    with pytest.raises(ValidationError, match="Debian package"):
        Recipe(packages=[package])


def test_a_root_file_system_needs_a_path_that_is_there() -> None:
    with pytest.raises(ValidationError, match="absolute path"):
        Recipe.model_validate({"source": "rootfs", "path": "relative"})
    with pytest.raises(Invalid, match="cannot be read"):
        source_digest(Recipe.model_validate({"source": "rootfs", "path": "/nowhere/at/all"}))
