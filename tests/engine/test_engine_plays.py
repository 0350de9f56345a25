"""Test, with generated plays and real machines, that a plan session predicts whole plays on every kind of host.

The plays do not build or remove templates, because that takes minutes: a task of the `sandbox_template` module only
declares that a template does not exist. ``tests/unit/plugins/test_whole_plays.py`` covers templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.collection.plays import (
    Block,
    Loop,
    Node,
    PlayChecks,
    PlayTask,
    empty_gateway,
    make_plays,
    make_tasks,
    read_play_count,
    skip_first,
)
from tests.engine.conftest import HOST_KINDS
from tests.support import session
from tests.support.busy_gateway import BUSY_PROGRAM
from tests.support.gateway import TEMPLATE as KVM_TEMPLATE
from tests.support.gateway import Gateway
from tests.support.world_gateway import world_gateway
from tests.support.worlds import TEMPLATE as JAIL_TEMPLATE

tasks = make_tasks(with_templates=False)


@pytest.fixture(scope="module", params=HOST_KINDS)
def busy_gateway(request: pytest.FixtureRequest) -> Iterator[tuple[Gateway, str]]:
    """A gateway and the name of its template. Each running sandbox has diverged."""
    if request.param == "kvm_xfs":
        yield request.getfixturevalue("seeded_gateways")(program=BUSY_PROGRAM), KVM_TEMPLATE
    else:
        directory = session.get_run_dir() / "plays"
        directory.mkdir()
        world = request.getfixturevalue("jail_zfs_world")
        with world_gateway(world, directory, program=BUSY_PROGRAM) as gateway:
            yield gateway, JAIL_TEMPLATE


@pytest.mark.parametrize(
    "has_approved_plan",
    # How plans are applied does not depend on the host.
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["without the plan", "with the plan"],
)
def test_a_plan_predicts_a_whole_play_on_real_machines(
    busy_gateway: tuple[Gateway, str], has_approved_plan: bool
) -> None:
    gateway, template = busy_gateway
    checks = PlayChecks()

    def replace_base(value: Any) -> Any:
        if isinstance(value, Loop | Block):
            return type(value)(**replace_base(vars(value)))
        if isinstance(value, dict):
            return {key: replace_base(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(replace_base, value))
        return template if value == "base" else value

    @settings(
        max_examples=1 + read_play_count(1, long_run_count=20),
        deadline=None,
        phases=[Phase.generate],  # do not shrink failing plays, which would take hours
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(tasks, max_size=2), make_plays(tasks))
    @skip_first
    def check(history: list[PlayTask], play: list[Node]) -> None:
        try:
            checks.check(
                gateway.url,
                replace_base(history),
                replace_base(play),
                has_approved_plan=has_approved_plan,
                template=template,
            )
        finally:
            empty_gateway(gateway.url)

    check()
    print(checks)
    checks.check_shares()
