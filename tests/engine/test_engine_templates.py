"""Test building templates from other templates, on every kind of host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sandbox_gateway.engine.builds import Build
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import InUse, Invalid
from sandbox_gateway.recipes import Recipe, Source
from tests.support.live import EngineRunner
from tests.support.waiting import wait_until
from tests.support.worlds import TEMPLATE, World

_BUILD_TIMEOUT_SECONDS = 600


@pytest.fixture
def templates_runner(make_runner: Callable[..., EngineRunner]) -> EngineRunner:
    """An engine of its own, because ``runner`` keeps its templates for other tests."""
    return make_runner()


def request_build(runner: EngineRunner, name: str, template: str, **fields: Any) -> Build:
    """Request a template that starts from ``template``. ``fields``: of the recipe, or ``disk_mb``."""
    sizes = {"disk_mb": fields.pop("disk_mb")} if "disk_mb" in fields else {}
    recipe = Recipe(source=Source.TEMPLATE, template=template, **fields)
    recipe = runner.call(runner.engine.templates.complete_recipe, recipe, sizes)
    return runner.do(runner.engine.templates.build(name, recipe))


def build_template(runner: EngineRunner, name: str, template: str, **fields: Any) -> str:
    """Build a template, and return the log."""
    build = request_build(runner, name, template, **fields)
    log = "\n".join(runner.follow(build, timeout=_BUILD_TIMEOUT_SECONDS))
    assert build.status == "ready", log
    return log


def test_a_template_outlives_the_template_that_it_was_built_from(
    make_runner: Callable[..., EngineRunner], world: World
) -> None:
    runner = make_runner()
    traces_before = world.read_traces(runner.config)
    snapshot_count = len(runner.engine.index.snapshots)
    build_template(
        runner,
        "lower",
        TEMPLATE,
        setup=["echo below > /root/lower"],
        start_command="echo started >> /var/lower.log; exec sleep 88888",
        ready_probe="test -e /var/lower.log",
    )
    setup = ["rm /var/lower.log", "cp /root/lower /root/upper"]
    log = build_template(runner, "upper", "lower", setup=setup)
    assert "starting echo started" in log and "waiting for test -e /var/lower.log" in log
    assert request_build(runner, "upper", "lower", setup=setup).status == "ready", "the same recipe needs no build"
    assert len(runner.engine.index.snapshots) == snapshot_count + 2 and not runner.engine.sandboxes.list()

    runner.do(runner.engine.forks.create("upper", ForkSpec(names=["of-upper"])))
    assert runner.shell("of-upper", "cat /root/upper /var/lower.log").split() == ["below", "started"]
    runner.shell("of-upper", "echo changed > /root/lower; sync")
    runner.do(runner.engine.forks.create("lower", ForkSpec(names=["of-lower"])))
    assert runner.shell("of-lower", "cat /root/lower; ls /root").split() == ["below", "lower"]
    with pytest.raises(InUse, match="of-lower"):
        runner.do(runner.engine.snapshots.delete("lower"))
    runner.do(runner.engine.sandboxes.delete("of-lower"))
    assert runner.do(runner.engine.snapshots.delete("lower"))

    runner.close()
    runner = make_runner(config=runner.config)
    assert runner.shell("of-upper", "cat /root/lower /root/upper").split() == ["changed", "below"]
    runner.do(runner.engine.forks.create("upper", ForkSpec(names=["later"])))
    assert runner.shell("later", "cat /root/lower /root/upper").split() == ["below", "below"]
    for name in ("of-upper", "later"):
        runner.do(runner.engine.sandboxes.delete(name))
    assert runner.do(runner.engine.snapshots.delete("upper"))
    wait_until(lambda: world.read_traces(runner.config) == traces_before)


def test_a_template_from_a_template_can_have_a_larger_disk_but_not_a_smaller_one(
    templates_runner: EngineRunner,
) -> None:
    runner = templates_runner
    size_mb = runner.engine.templates.get(TEMPLATE).resources.disk_mb
    with pytest.raises(Invalid, match=f"request at least {size_mb} MiB"):
        request_build(runner, "smaller", TEMPLATE, disk_mb=size_mb - 1)
    build_template(runner, "larger", TEMPLATE, disk_mb=size_mb + 1024)
    runner.do(runner.engine.forks.create("larger", ForkSpec(names=["large"])))
    assert runner.get_sandbox("large").resources.disk_mb == size_mb + 1024
    total_mb = int(runner.shell("large", "df -m --output=size /").split()[-1])
    assert total_mb > size_mb + 512, "the disk of the guest has grown"


def test_a_failed_build_from_a_template_leaves_nothing(templates_runner: EngineRunner) -> None:
    runner = templates_runner
    snapshots_before = {*runner.engine.index.snapshots}
    build = request_build(runner, "broken", TEMPLATE, setup=["echo before", "exit 7"])
    log = "\n".join(runner.follow(build, timeout=_BUILD_TIMEOUT_SECONDS))
    assert build.status != "ready" and "failed with exit code 7" in build.reason, (log, build)
    assert {*runner.engine.index.snapshots} == snapshots_before and not runner.engine.sandboxes.list()
    build_template(runner, "broken", TEMPLATE, setup=["echo before"])
