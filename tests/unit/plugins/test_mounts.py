"""Test that modules accept the same mount paths as the gateway, so that check mode predicts correctly."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import check_no_overlap, parse_mounts, validate_path
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.errors import Invalid

SEGMENTS = st.sampled_from(
    ["srv", "etc", "proc", "run", "usr", "home", "tmp", "a", "a.b", "..", ".", "", "ä", "a b", "x:y"]
)
PATHS = st.builds(
    lambda segments, prefix: prefix + "/".join(segments), st.lists(SEGMENTS, max_size=4), st.sampled_from(["/", ""])
)


def is_refused(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except (Failure, Invalid):
        return True
    return False


@given(PATHS | st.text(max_size=12))
def test_modules_and_gateway_refuse_the_same_paths(path: str) -> None:
    assert is_refused(validate_path, path) == is_refused(check_mount_paths, [path.rstrip("/")])


@given(
    st.lists(
        st.builds(lambda steps: "/srv/" + "/".join(steps), st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
    )
)
def test_modules_and_gateway_refuse_the_same_overlaps(paths: list[str]) -> None:
    assert is_refused(check_no_overlap, paths) == is_refused(check_mount_paths, paths)


@pytest.mark.parametrize("path", ["/srv/data", "/srv/data/", "/opt", "/home/me", "/var/lib/x", "/a" * 127])
def test_valid_paths_are_accepted(path: str) -> None:
    assert validate_path(path) == path.rstrip("/")


def test_long_paths_are_shortened_in_errors() -> None:
    with pytest.raises(Failure, match="at most 255") as error_info:
        validate_path("/a" * 5000)
    assert len(error_info.value.message) < 400


def test_mounts_are_sorted_and_repeated_volumes_are_refused() -> None:
    mount_options = [{"name": "b", "path": "/srv/b/", "read_only": True}, {"name": "a", "path": "/srv/a"}]
    mounts = parse_mounts(mount_options)
    assert mounts is not None
    assert [mount.make_view() for mount in mounts] == [
        {"name": "a", "path": "/srv/a", "read_only": False},
        {"name": "b", "path": "/srv/b", "read_only": True},
    ]
    assert parse_mounts(None) is None and parse_mounts([]) == ()
    with pytest.raises(Failure, match="listed twice"):
        parse_mounts([{"name": "a", "path": "/srv/a"}, {"name": "a", "path": "/srv/b"}])
