"""Test, with generated states and options, that predictions are correct and that a second run changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import (
    _fork,
    _rollback,
    _sandbox,
    _snapshot,
    _template,
    _volume,
)
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._run import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collection.runner import check_prediction
from tests.support.faulty_gateway import FaultyGateway

RESOURCE_KINDS = {
    "sandbox": _sandbox,
    "fork": _fork,
    "snapshot": _snapshot,
    "rollback": _rollback,
    "template": _template,
    "volume": _volume,
}


@pytest.fixture(scope="module")
def client(gateway: FaultyGateway) -> Iterator[Client]:
    client = Client(gateway.url)
    yield client
    client.close()


def get_default_options(resource_kind: Any) -> dict[str, Any]:
    return {name: option.get("default") for name, option in resource_kind.ARGUMENTS.items()}


SANDBOXES = ["a", "b", "ci-1", "ci-2", "ci-3"]
SNAPSHOTS = ["s", "t", "u"]
TEMPLATES = ["base", "web"]
VOLUMES = ["data", "cache"]
names = st.lists(st.sampled_from(SANDBOXES), min_size=1, max_size=3, unique=True)
metadata = st.none() | st.dictionaries(st.sampled_from(["k", "l"]), st.sampled_from(["1", 2, True]), max_size=2)
size_options = {"cpus": st.none() | st.sampled_from([1, 2]), "memory_mb": st.none() | st.sampled_from([256, 512])}
# Only a gateway knows which addresses its host refuses, so the prediction without a plan session would be wrong.
network = st.none() | st.fixed_dictionaries(
    {
        "allow_internet": st.none() | st.booleans(),
        "allow_out": st.none() | st.lists(st.sampled_from(["10.0.0.1", "10.0.0.1/32", "10.1.2.3/8"]), max_size=2),
        "deny_out": st.none() | st.lists(st.sampled_from(["0.0.0.0/0", "10.0.0.9"]), max_size=1),
    }
)
paths = st.sampled_from(["/srv/a", "/srv/b", "/srv/c/", "/srv/d", "/srv/b/inside"])


def make_mount_lists(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mount_options = {"name": st.sampled_from(VOLUMES), "path": paths, "read_only": st.booleans(), **options}
    return st.none() | st.lists(st.fixed_dictionaries(mount_options), max_size=2)


attachment = st.fixed_dictionaries(
    {"sandbox": st.sampled_from(SANDBOXES[:2]), "path": paths, "read_only": st.booleans()}
)
attachments = st.none() | st.lists(attachment, max_size=2)
source = st.sampled_from(
    [{"template": "base"}, {"template": "web"}, {"snapshot": "s"}, {"snapshot": "t"}, {}],
)
task_options = {
    "sandbox": st.builds(
        lambda options, source_options: {**options, **source_options},
        st.fixed_dictionaries(
            {
                "name": names,
                "state": st.sampled_from(["present", "running", "paused", "absent"]),
                "metadata": metadata,
                "network": network,
                "timeout": st.sampled_from([None, -1, 3600, 7200]),
                "cold_start": st.booleans(),
                "volumes": make_mount_lists(),
                "recreate": st.booleans(),
                "continue_on_error": st.booleans(),
                **size_options,
            }
        ),
        source,
    ),
    "fork": st.builds(
        lambda options, source_options, selection: {**options, **source_options, **selection},
        st.fixed_dictionaries(
            {
                "state": st.sampled_from(["present", "present", "absent"]),
                "exact": st.booleans(),
                "atomic": st.booleans(),
                "metadata": metadata,
                "timeout": st.sampled_from([None, None, -1, 3600, 7200]),
                "paused": st.booleans(),
                "cold_start": st.booleans(),
                "volumes": make_mount_lists(clone=st.booleans()),
                "recreate": st.booleans(),
                "continue_on_error": st.booleans(),
                **size_options,
            }
        ),
        st.sampled_from([{"snapshot": "s"}, {"snapshot": "base"}, {"sandbox": "a"}]),
        st.builds(lambda count: {"name_prefix": "ci", "count": count}, st.integers(0, 4))
        | st.builds(lambda chosen_names: {"names": chosen_names}, names),
    ),
    "snapshot": st.fixed_dictionaries(
        {
            "name": st.lists(st.sampled_from(SNAPSHOTS), min_size=1, max_size=2, unique=True),
            "sandbox": st.lists(st.sampled_from(SANDBOXES), min_size=1, max_size=1),
            "state": st.sampled_from(["present", "present", "absent"]),
            "when_changed": st.booleans(),
            "when_unused": st.booleans(),
            "memory": st.sampled_from(["auto", "none"]),
            "description": st.sampled_from([None, "one", "two"]),
            "prewarm": st.sampled_from([None, None, 0, 1]),
            "volumes": st.none() | st.lists(st.sampled_from(VOLUMES), max_size=2, unique=True),
            "continue_on_error": st.booleans(),
        }
    ),
    "rollback": st.builds(
        lambda options, backups: {
            **options,
            "backup_name": [f"{each}-old" for each in options["sandbox"]] if backups else [],
        },
        st.fixed_dictionaries({"sandbox": names, "snapshot": st.sampled_from(["s", "t", "base"])}),
        st.booleans(),
    ),
    "template": st.fixed_dictionaries(
        {
            "name": st.lists(st.sampled_from(TEMPLATES), min_size=1, max_size=2, unique=True),
            "state": st.sampled_from(["present", "present", "absent"]),
            "packages": st.none() | st.lists(st.sampled_from(["curl", "nginx"]), max_size=3),
            "setup": st.none() | st.lists(st.sampled_from(["echo", "true"]), max_size=1),
            "when_unused": st.booleans(),
            "memory_mb": st.none() | st.just(512),
            "prewarm": st.sampled_from([None, None, 0, 1]),
        }
    ),
    "volume": st.fixed_dictionaries(
        {
            "name": st.lists(st.sampled_from([*VOLUMES, "ci-1-data"]), min_size=1, max_size=2, unique=True),
            "state": st.sampled_from(["present", "present", "present", "absent"]),
            "size_mb": st.sampled_from([None, 64, 128, 1024]),
            "from_snapshot": st.sampled_from([None, None, "data@one", "cache@one"]),
            "attachments": attachments,
            "snapshots": st.none() | st.lists(st.sampled_from(["one", "two"]), max_size=2, unique=True),
            "rollback_to": st.sampled_from([None, None, "one"]),
            "force": st.booleans(),
            "absent_snapshots": st.sampled_from([None, None, ["one"]]),
            "purge": st.booleans(),
            "continue_on_error": st.booleans(),
        }
    ),
}
tasks = st.sampled_from(sorted(task_options)).flatmap(lambda kind: st.tuples(st.just(kind), task_options[kind]))


@pytest.fixture(autouse=True)
def _no_poll_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template, "POLL_SECONDS", (0, 0))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(tasks, max_size=6), st.lists(st.sampled_from(SANDBOXES), max_size=3), tasks)
def test_predictions_are_correct_and_runs_are_idempotent(
    gateway: FaultyGateway,
    client: Client,
    history: list[tuple[str, dict[str, Any]]],
    changed_sandboxes: list[str],
    task: tuple[str, dict[str, Any]],
) -> None:
    gateway.reset()
    run_task(client, "volume", {"name": ["data", "cache"], "snapshots": ["one"]})
    run_task(client, "sandbox", {"name": ["a"], "template": "base", "volumes": [{"name": "data", "path": "/srv/a"}]})
    run_task(client, "snapshot", {"name": ["s"], "sandbox": ["a"], "volumes": ["data"]})
    for kind, params in history:
        run_task(client, kind, params)
    for name in dict.fromkeys(changed_sandboxes):
        gateway.write_file(name)
    kind, params = task
    gateway.calls.clear()
    predicted_result = run_task(client, kind, params, check=True)
    assert {method for method, _ in gateway.calls} <= {"GET"}
    actual_result = run_task(client, kind, params)
    assert predicted_result.get("failed") == actual_result.get("failed"), (
        predicted_result.get("msg"),
        actual_result.get("msg"),
    )
    assert predicted_result.get("failure") == actual_result.get("failure")
    if "diff" not in actual_result:
        return
    check_prediction(predicted_result, actual_result)
    repeated_result = run_task(client, kind, params)
    if params.get("rollback_to"):
        # The gateway cannot detect writes to a volume since the snapshot, so every run rolls it back.
        assert {verb for each in repeated_result["outcomes"] for verb in each["actions"]} <= {"rollback"}
        return
    assert not repeated_result["changed"], (repeated_result["outcomes"], repeated_result["diff"])
    # The counts in the message may differ, because removed resources are no longer counted.
    for key in ("kind", "blockers"):
        assert repeated_result.get("failure", {}).get(key) == actual_result.get("failure", {}).get(key)


def run_task(client: Client, kind: str, params: dict[str, Any], *, check: bool = False) -> dict[str, Any]:
    options = {name: value for name, value in params.items() if value is not None}
    return run(
        RESOURCE_KINDS[kind], {**get_default_options(RESOURCE_KINDS[kind]), **options}, check_mode=check, client=client
    )


@pytest.mark.parametrize("selection", [{"count": 3, "name_prefix": "ci", "exact": True}, {"names": ["ci-1", "ci-3"]}])
def test_existing_forks_need_only_one_request(
    gateway: FaultyGateway, client: Client, selection: dict[str, Any]
) -> None:
    gateway.reset()
    common_options = {"snapshot": "base", "metadata": {"run": 7}}
    created_result = run_task(client, "fork", {**common_options, "count": 3, "name_prefix": "ci"})
    gateway.calls.clear()
    repeated_result = run_task(client, "fork", {**common_options, **selection})
    assert [method for method, _ in gateway.calls] == ["GET"], gateway.calls
    assert (
        not repeated_result["changed"]
        and repeated_result["sandboxes"][0] == created_result["sandboxes"][0]
        and repeated_result["outcomes"] == []
    )


def test_fork_results_contain_only_the_documented_fields(gateway: FaultyGateway, client: Client) -> None:
    gateway.reset()
    for check in (True, False):
        created_result = run_task(
            client, "fork", {"snapshot": "base", "names": ["one"], "metadata": {"a": "b"}}, check=check
        )
        (listed_sandbox,) = created_result["sandboxes"]
        assert listed_sandbox == created_result["sandbox"]
        assert list(listed_sandbox) == ["id", "name", "state", "address", "forked_from", "snapshot_id", "volumes"]
