"""The mount paths that modules accept: the same as the gateway's, so that check mode does not promise more."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import check_apart, checked_path, desired_mounts
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.engine.mount_paths import check_mount_paths
from sandbox_gateway.errors import Invalid

STEPS = st.sampled_from(
    ["srv", "etc", "proc", "run", "usr", "home", "tmp", "a", "a.b", "..", ".", "", "ä", "a b", "x:y"]
)
PATHS = st.builds(lambda steps, lead: lead + "/".join(steps), st.lists(STEPS, max_size=4), st.sampled_from(["/", ""]))


def is_refused(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except (Failure, Invalid):
        return True
    return False


@given(PATHS | st.text(max_size=12))
def test_a_path_is_refused_exactly_where_the_gateway_refuses_it(path: str) -> None:
    assert is_refused(checked_path, path) == is_refused(check_mount_paths, [path.rstrip("/")])


@given(
    st.lists(
        st.builds(lambda steps: "/srv/" + "/".join(steps), st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
    )
)
def test_paths_overlap_exactly_where_the_gateway_says_so(paths: list[str]) -> None:
    assert is_refused(check_apart, paths) == is_refused(check_mount_paths, paths)


@pytest.mark.parametrize("path", ["/srv/data", "/srv/data/", "/opt", "/home/me", "/var/lib/x", "/a" * 127])
def test_valid_paths(path: str) -> None:
    assert checked_path(path) == path.rstrip("/")


def test_a_long_path_is_shortened_in_the_error() -> None:
    with pytest.raises(Failure, match="at most 255") as caught:
        checked_path("/a" * 5000)
    assert len(caught.value.message) < 400


def test_volumes_are_sorted_and_unique() -> None:
    given_list = [{"name": "b", "path": "/srv/b/", "read_only": True}, {"name": "a", "path": "/srv/a"}]
    found = desired_mounts(given_list)
    assert found is not None
    assert [mount.view() for mount in found] == [
        {"name": "a", "path": "/srv/a", "read_only": False},
        {"name": "b", "path": "/srv/b", "read_only": True},
    ]
    assert desired_mounts(None) is None and desired_mounts([]) == ()
    with pytest.raises(Failure, match="listed twice"):
        desired_mounts([{"name": "a", "path": "/srv/a"}, {"name": "a", "path": "/srv/b"}])
