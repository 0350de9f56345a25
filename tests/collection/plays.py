"""Generated plays, which run in check mode, and then with or without their plan, against a gateway of any kind."""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils import _info
from ansible_collections.grove.sandbox.plugins.module_utils._approval import (
    make_approved_option,
    make_initial_state,
    update_state,
)
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, run
from ansible_collections.grove.sandbox.plugins.plugin_utils._plan_conditions import mark_dependent_entries
from hypothesis import strategies as st

from tests.collection.plan_comparison import Counts, PlanComparison, read_state, restore_predicted_failures
from tests.support.waiting import wait_until
from tests.unit.plugins import test_plans
from tests.unit.plugins.test_plans import SANDBOXES, SNAPSHOTS, VOLUMES, attachments, make_mount_lists, task_options

PLAYS_VARIABLE = "GROVE_PLAYS"
"""The environment variable for the number of generated plays; see ``read_play_count``."""
MAX_TASKS = 12
MAX_PARTIAL_SHARE = 0.1
"""Bound for the share of plays that are not compared to the end.

About one in a hundred plays is not, but Hypothesis derives plays from earlier plays, so these plays occur in groups:
5, 16 and 1 among the first, second and third 300 plays.
"""
_MAX_PARTIAL_COUNT_IN_SHORT_RUNS = 2
"""The bound for short runs, in which a share would depend on chance. At least one play must be compared to the end."""
PlayTask = tuple[str, dict[str, Any]]
BY_ID = "by_id"
"""A key of tasks that refer to sandboxes and snapshots by ids, which they take from earlier results of the play."""

_ID_VALUES = {"SOURCE": "a", "TRY": "fork ci-1 of s"}
"""Values of ``env`` and ``metadata`` in which tasks with ``BY_ID`` have ids in place of names."""
_ID_NAME = "of-ci-1"
"""A name in which all tasks have the id of the sandbox ci-1, if an earlier result of the play contains it."""
_runs = itertools.count()
_new_names = st.lists(st.sampled_from(["c", "ci-1", "ci-2", _ID_NAME]), min_size=1, max_size=2, unique=True)
_likely_options = {
    "sandbox": st.fixed_dictionaries(
        {
            "name": _new_names,
            "template": st.just("base"),
            "state": st.sampled_from(["present", "running", "paused", "absent"]),
            "metadata": st.sampled_from([None, {"k": "1"}, _ID_VALUES]),
            "timeout": st.sampled_from([None, 3600]),
            "volumes": make_mount_lists() | st.just([{"name": _ID_NAME, "path": "/srv/of"}]),
            "env": st.sampled_from([None, None, {"TOKEN": "a-secret-value"}, _ID_VALUES]),
            "disk_mb": st.sampled_from([None, None, None, 4096]),
        }
    ),
    "fork": st.fixed_dictionaries(
        {
            "snapshot": st.sampled_from(["s", "base", _ID_NAME]),
            "count": st.integers(1, 3),
            "name_prefix": st.just("ci"),
            "paused": st.booleans(),
            "exact": st.booleans(),
            "concurrency": st.sampled_from([None, 1, 2]),
        }
    )
    | st.fixed_dictionaries({"sandbox": st.sampled_from(["a", "b", _ID_NAME]), "names": _new_names}),
    "snapshot": st.fixed_dictionaries(
        {
            "name": st.sampled_from([["s"], ["t"], ["u"], [_ID_NAME]]),
            "sandbox": st.sampled_from([["a"], ["b"], ["ci-1"], [_ID_NAME]]),
            "when_changed": st.booleans(),
            "memory": st.sampled_from(["auto", "none"]),
            "volumes": st.sampled_from([None, ["data"]]),
            "retention": st.sampled_from([None, None, {"keep_last": 1}, {"keep_last": 2}]),
            "expires_in": st.sampled_from([None, None, 3600]),
        }
    )
    | st.fixed_dictionaries(
        {"name": st.sampled_from([["t"], ["u"], [_ID_NAME]]), "state": st.just("absent"), "when_unused": st.booleans()}
    ),
    "rollback": st.fixed_dictionaries(
        {
            "sandbox": st.sampled_from([["a"], ["b"], ["ci-1"], [_ID_NAME]]),
            "snapshot": st.sampled_from(["s", "t", _ID_NAME]),
            "unless_clean": st.booleans(),
        }
    ),
    "volume": st.fixed_dictionaries(
        {
            "name": st.sampled_from([["data"], ["cache"], ["copy"], [_ID_NAME]]),
            "size_mb": st.sampled_from([64, 128]),
            "snapshots": st.sampled_from([None, ["one"], ["one", "two"]]),
            "attachments": attachments,
        }
    )
    | st.just({"name": ["copy"], "size_mb": 128, "from_snapshot": "data@one"}),
}
"""Tasks that change something more often than those of ``task_options``, of which most are refused."""
_EXISTING, _EXISTING_VOLUME, _EXPORTED, _NEW = "existing", "existing volume", "exported", "new"
"""Files in options: two that exist before the play, with a snapshot of a sandbox and one of a volume, the first one
that the play exports, and one for this task.
"""
_transfer_options = {
    "snapshot": st.fixed_dictionaries(
        {
            "name": st.sampled_from([["s"], ["t"], ["u"]]),
            "sandbox": st.sampled_from([None, ["a"], ["b"]]),
            "memory": st.sampled_from(["auto", "none"]),
            "export_to": st.just(_NEW),
        }
    )
    | st.fixed_dictionaries(
        {
            "name": st.sampled_from([["t"], ["u"], ["ci-1"]]),
            "import_from": st.sampled_from([_EXISTING] * 5 + [_EXISTING_VOLUME, _EXPORTED]),
        }
    ),
    "volume": st.fixed_dictionaries(
        {
            "name": st.sampled_from([["data"], ["cache"], ["copy"]]),
            "snapshots": st.sampled_from([["one"], ["two"]]),
            "export_to": st.just(_NEW),
        }
    )
    | st.fixed_dictionaries(
        {
            "name": st.sampled_from([["copy"], ["copy"], ["cache"]]),
            "import_from": st.sampled_from([_EXISTING_VOLUME] * 5 + [_EXISTING, _EXPORTED]),
            "size_mb": st.sampled_from([None, 64, 128]),
        }
    ),
}

_LISTINGS = {
    "sandbox_info": _info.SANDBOXES,
    "snapshot_info": _info.SNAPSHOTS,
    "template_info": _info.TEMPLATES,
    "volume_info": _info.VOLUMES,
}
_info_options = {
    "sandbox_info": st.sampled_from([{}, {"state": ["paused"]}, {"snapshot": "s"}, {"template": "base"}])
    | st.builds(lambda name: {"name": [name]}, st.sampled_from(SANDBOXES)),
    "snapshot_info": st.sampled_from([{}, {"sandbox": "a"}, {"template": "base"}]),
    "template_info": st.just({}),
    "volume_info": st.just({}),
}


def make_tasks(*, with_templates: bool, with_files: bool = False) -> st.SearchStrategy[PlayTask]:
    """Return a strategy for tasks of all modules.

    Without ``with_templates``, no task builds or removes a template. With ``with_files``, tasks export and import
    snapshots of sandboxes and volumes.
    """
    options = {**task_options}
    if not with_templates:
        options["template"] = st.just({"name": ["web"], "state": "absent"})
    any_tasks = [st.tuples(st.just(kind), options[kind]) for kind in sorted(options)]
    likely_tasks = [st.tuples(st.just(kind), _likely_options[kind]) for kind in sorted(_likely_options)]
    info_tasks = st.one_of(*(st.tuples(st.just(kind), _info_options[kind]) for kind in _LISTINGS))
    transfer_tasks = [st.tuples(st.just(kind), _transfer_options[kind]) for kind in _transfer_options if with_files]
    return st.one_of(*likely_tasks, *any_tasks, *likely_tasks, info_tasks, *transfer_tasks)


def run_task(client: Client, kind: str, params: dict[str, Any], *, check: bool = False) -> dict[str, Any]:
    """Run a task of any module. ``kind``: the name of the module without ``sandbox_``, except for ``sandbox_info``."""
    if kind in _LISTINGS:
        return run(_LISTINGS[kind], params, check_mode=check, client=client)
    return test_plans.run_task(client, kind, params, check=check)


@dataclass(frozen=True)
class Loop:
    """A task with several items. An item that fails does not stop the other items, but the task fails."""

    kind: str
    items: list[dict[str, Any]]


@dataclass(frozen=True)
class Block:
    """Nodes of a play whose first failure starts ``rescue``. At the end, ``always`` runs in any case."""

    nodes: list[Node]
    rescue: list[Node]
    always: list[Node]


Node = PlayTask | Loop | Block
_NODE_KINDS = st.sampled_from(["task", "task", "task", "task", "loop", "block"])
_FAILING_TASKS: st.SearchStrategy[PlayTask] = st.sampled_from(
    [
        ("rollback", {"sandbox": ["missing"], "snapshot": "s"}),
        ("sandbox", {"name": ["d"], "template": "missing"}),
    ]
)


def make_plays(tasks: st.SearchStrategy[PlayTask], *, max_tasks: int = MAX_TASKS) -> st.SearchStrategy[list[Node]]:
    """Return a strategy for plays, whose number of tasks is uniformly distributed: lists of ``st.lists`` are short.

    A third of the nodes are loops or blocks, some of which contain another block. A quarter of the tasks refer to
    objects by id.
    """
    play_tasks = st.builds(
        lambda task, draw: (task[0], {**task[1], BY_ID: True}) if draw == 0 else task, tasks, st.integers(0, 3)
    )
    return st.integers(1, max_tasks).flatmap(lambda count: _make_nodes(play_tasks, count))


@st.composite
def _make_nodes(
    draw: st.DrawFn, tasks: st.SearchStrategy[PlayTask], count: int, max_depth: int = 2, is_strict: bool = False
) -> list[Node]:
    """Draw nodes with ``count`` tasks. ``max_depth``: how deep blocks are nested. ``is_strict``: see ``carry_out``."""
    nodes: list[Node] = []
    while count:
        kind = draw(_NODE_KINDS)
        if kind == "block" and max_depth and count > 1:
            node_count = draw(st.integers(1, min(4, count - 1)))
            rescue_count = draw(st.integers(0 if is_strict else 1, min(2, count - node_count)))
            always_count = draw(st.integers(0, min(2, count - node_count - rescue_count)))
            fails = draw(st.booleans())
            nodes.append(
                Block(
                    [
                        *draw(_make_nodes(tasks, node_count - fails, max_depth - 1, is_strict=True)),
                        *([draw(_FAILING_TASKS)] if fails else []),
                    ],
                    draw(_make_nodes(tasks, rescue_count, 0, is_strict)),
                    draw(_make_nodes(tasks, always_count, 0, is_strict)),
                )
            )
            count -= node_count + rescue_count + always_count
        else:
            task = draw(tasks)
            nodes.append(draw(_make_loops(task)) if kind == "loop" else task)
            count -= 1
    return nodes


_LOOP_NAMES = {
    ("sandbox", "name"): SANDBOXES,
    ("fork", "names"): SANDBOXES,
    ("snapshot", "name"): SNAPSHOTS,
    ("rollback", "sandbox"): SANDBOXES,
    ("volume", "name"): VOLUMES,
}


def _make_loops(task: PlayTask) -> st.SearchStrategy[Loop]:
    """Return a strategy for loops that run a task for several names or, if it has no list of names, twice."""
    kind, params = task
    for (named_kind, key), names in _LOOP_NAMES.items():
        if named_kind == kind and key in params:
            name_lists = st.lists(st.sampled_from(names), min_size=2, max_size=3)
            return name_lists.map(
                lambda items, key=key: Loop(kind, [_select_name(params, key, item) for item in items])
            )
    return st.just(Loop(kind, [params, params]))


def _select_name(params: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    backups = {"backup_name": [f"{name}-old"]} if params.get("backup_name") else {}
    return {**params, key: [name], **backups}


def carry_out(
    nodes: Iterable[Node],
    run_task: Callable[[str, PlayTask | Loop], bool],
    *,
    location: str = "",
    is_strict: bool = False,
) -> bool:
    """Carry out nodes of a play as Ansible does. Returns whether they succeeded.

    ``run_task`` is called with each task's location, such as ``2.rescue.0``, and returns whether the task succeeded.
    ``is_strict``: a failure ends the list, because a surrounding block rescues it. Other failures are ignored.
    """
    for number, node in enumerate(nodes):
        here = f"{location}{number}"
        if isinstance(node, Block):
            assert node.rescue or is_strict, "the failure of a block without a rescue would end the play"
            is_successful = carry_out(node.nodes, run_task, location=f"{here}.block.", is_strict=True) or (
                bool(node.rescue) and carry_out(node.rescue, run_task, location=f"{here}.rescue.", is_strict=is_strict)
            )
            is_successful &= carry_out(node.always, run_task, location=f"{here}.always.", is_strict=is_strict)
        else:
            is_successful = run_task(here, node)
        if is_strict and not is_successful:
            return False
    return True


def run_play(
    play: Iterable[Node], files: PlayFiles, run_item: Callable[[str, str, dict[str, Any]], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Run a play, and return the results of its tasks by location. Each loop item has a location, such as ``3[0]``.

    ``run_item`` runs a task, or one item of it, and is called with the location, the module and the options.
    """
    results: dict[str, dict[str, Any]] = {}
    exporting_locations: list[str] = []

    def run_task(location: str, node: PlayTask | Loop) -> bool:
        earlier_results = [*results.values()]
        items = (
            {location: node[1]}
            if isinstance(node, tuple)
            else {f"{location}[{i}]": item for i, item in enumerate(node.items)}
        )
        kind = node[0] if isinstance(node, tuple) else node.kind
        for item_location, params in items.items():
            options = files.insert(
                replace_names_with_ids(kind, params, earlier_results), item_location, exporting_locations
            )
            results[item_location] = run_item(item_location, kind, options)
        return not any(results[each].get("failed") for each in items)

    carry_out(play, run_task)
    return results


def replace_names_with_ids(kind: str, params: dict[str, Any], results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of a task, with ids instead of names if the results of earlier tasks contain the ids."""
    objects = [each for result in results for kind in ("sandboxes", "snapshots") for each in result.get(kind, [])]
    ids = {each["name"]: each["id"] for each in objects if each.get("id")}
    params = _insert_id_into_names(dict(params), ids)
    if params.pop(BY_ID, False):
        for key in ("sandbox", "snapshot", *(("name",) if kind == "sandbox" else ())):
            if isinstance(value := params.get(key), list):
                params[key] = [ids.get(name, name) for name in value]
            elif value is not None:
                params[key] = ids.get(value, value)
        for key in ("env", "metadata"):
            for name, text in (params.get(key) or {}).items():
                if params[key] == _ID_VALUES:
                    params[key] = {**params[key], name: " ".join(ids.get(word, word) for word in text.split())}
        if params.get("attachments"):
            params["attachments"] = [
                {**each, "sandbox": ids.get(each["sandbox"], each["sandbox"])} for each in params["attachments"]
            ]
    return params


def _insert_id_into_names(value: Any, ids: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _insert_id_into_names(each, ids) for key, each in value.items()}
    if isinstance(value, list):
        return [_insert_id_into_names(each, ids) for each in value]
    return f"of-{ids['ci-1']}" if value == _ID_NAME and "ci-1" in ids else value


@dataclass(frozen=True)
class PlayFiles:
    """The files of a play. Exports are written to ``directory``.

    ``existing``, ``existing_volume``: files with a snapshot of a sandbox and of a volume, which exist before the play.
    """

    directory: Path
    existing: Path
    existing_volume: Path

    def insert(self, params: dict[str, Any], location: str, exporting_locations: list[str]) -> dict[str, Any]:
        """Return the options of a task with the paths of its files. Adds ``location`` to ``exporting_locations``."""
        params = dict(params)
        if params.get("export_to"):
            params["export_to"] = str(self.directory / location)
            exporting_locations.append(location)
        if params.get("import_from") == _EXISTING:
            params["import_from"] = str(self.existing)
        elif params.get("import_from") == _EXISTING_VOLUME:
            params["import_from"] = str(self.existing_volume)
        elif params.get("import_from") == _EXPORTED:
            params["import_from"] = str(self.directory / [*exporting_locations, "missing"][0])
        return params


def read_play_count(default: int, *, long_run_count: int) -> int:
    """Return how many plays a test generates: ``default``, or ``long_run_count`` if GROVE_PLAYS is ``all``.

    GROVE_PLAYS can also be the number of plays.
    """
    count = os.environ.get(PLAYS_VARIABLE, "")
    return long_run_count if count == "all" else int(count or default)


def skip_first(check: Callable[..., None]) -> Callable[..., None]:
    """Return ``check`` without its first call, because Hypothesis begins with the simplest play, which tests little."""
    calls = itertools.count()

    @functools.wraps(check)
    def check_others(*args: Any, **kwargs: Any) -> None:
        if next(calls):
            check(*args, **kwargs)

    return check_others


class PlayChecks:
    """Checks plays, and counts their tasks and the values that were compared."""

    def __init__(self) -> None:
        self.results = Counts()
        self.states = Counts()
        self.play_count = 0
        self.tasks: Counter[str] = Counter()
        """The number of tasks that changed something, were refused, or did nothing."""
        self.uncertain_count = 0
        """The number of tasks whose outcome depends on whether a sandbox has diverged."""
        self.partial_count = 0
        """The number of plays in which such a task had a different outcome, so later tasks had different states."""

    def __str__(self) -> str:
        tasks = ", ".join(f"{count} {outcome}" for outcome, count in self.tasks.most_common())
        plays = f"{self.play_count} plays ({tasks}; {self.uncertain_count} uncertain), {self.partial_count} in part"
        return f"{plays}\nresults of tasks: {self.results}\nstates of gateways: {self.states}"

    def check_shares(self) -> None:
        """Check that most values were known, and that most plays were compared to the end."""
        self.results.check_unknown_share()
        self.states.check_unknown_share()
        assert self.partial_count < self.play_count, str(self)
        assert self.partial_count <= max(_MAX_PARTIAL_COUNT_IN_SHORT_RUNS, MAX_PARTIAL_SHARE * self.play_count), str(
            self
        )

    def check(
        self,
        url: str,
        history: Sequence[PlayTask],
        play: Sequence[Node],
        *,
        has_approved_plan: bool = False,
        template: str = "base",
        before_run: Callable[[], None] = lambda: None,
        existing_file: Path = Path("/nowhere"),
        existing_volume_file: Path = Path("/nowhere"),
    ) -> list[dict[str, Any]]:
        """Check that a plan session predicts a play, with the gateway in the state that ``history`` creates.

        At the beginning, the gateway must have only its templates. Returns the entries of the plan. A task may have
        a different outcome only if its entry says that it depends on what the run finds. Then the states also differ,
        so later tasks are only checked for their outcomes. ``has_approved_plan``: whether the run may only do what was
        predicted. ``existing_file`` and ``existing_volume_file`` contain snapshots that tasks can import.
        """
        with tempfile.TemporaryDirectory() as directory:
            files = PlayFiles(Path(directory), existing_file, existing_volume_file)
            return self._check(url, history, play, has_approved_plan, template, before_run, files)

    def _check(
        self,
        url: str,
        history: Sequence[PlayTask],
        play: Sequence[Node],
        has_approved_plan: bool,
        template: str,
        before_run: Callable[[], None],
        files: PlayFiles,
    ) -> list[dict[str, Any]]:
        client, planner, run_client = Client(url), Client(url), Client(url)
        try:
            _set_up(client, template)
            for number, (kind, params) in enumerate(history):
                run_task(client, kind, files.insert(params, f"history-{number}", []))
            assert planner.enter_plan(f"generated-play-{os.getpid()}-{next(_runs):06}")
            predicted = run_play(play, files, lambda _place, kind, params: run_task(planner, kind, params, check=True))
            entries = make_entries(predicted)
            uncertain_locations = {entry["location"] for entry in entries if any(map(is_condition, entry["unknown"]))}
            before_run()
            actual = (
                apply_predicted(client, run_client, play, files, entries)
                if has_approved_plan
                else run_play(play, files, lambda _place, kind, params: run_task(run_client, kind, params))
            )
            is_as_predicted = True
            comparison = PlanComparison(
                planner.plan_opened_at, self.results, self.states, has_approved_plan=has_approved_plan
            )
            for location, result in actual.items():
                outcome = describe_outcome(result)
                self.tasks[outcome] += 1
                prediction = predicted.get(location)
                if prediction is None:
                    # An uncertain task failed or succeeded unexpectedly, so the run takes another path through a block.
                    assert not is_as_predicted and not (has_approved_plan and result["changed"]), (location, result)
                    continue
                if location in uncertain_locations:
                    if has_approved_plan:
                        result = restore_predicted_failures(prediction, result)
                    is_as_predicted &= describe_outcomes(prediction) == describe_outcomes(result)
                    # A task can fail for a different reason, such as the contents of a file that exists by then.
                    is_as_predicted &= prediction.get("failure") == result.get("failure")
                    self.uncertain_count += 1
                elif not is_as_predicted and predicted.keys() == actual.keys():
                    assert describe_outcome(prediction) == outcome, (location, prediction, result)
                if is_as_predicted:
                    comparison.check_result(prediction, result, f"task {location}")
            assert not is_as_predicted or predicted.keys() == actual.keys(), (predicted.keys(), actual.keys())
            if is_as_predicted:
                comparison.check_state(lambda: read_state(planner), lambda: read_state(run_client))
            self.partial_count += not is_as_predicted
            self.play_count += 1
            return entries
        except AssertionError as error:
            error.add_note(f"history = {history}\nplay = {play}")
            raise
        finally:
            for each in (planner, run_client):
                if each.session_path:
                    client.delete(each.session_path)
                each.close()
            client.close()


def _set_up(client: Client, template: str) -> None:
    for kind, params in (
        ("volume", {"name": ["data", "cache"], "size_mb": 64, "snapshots": ["one"]}),
        ("sandbox", {"name": ["a"], "template": template, "volumes": [{"name": "data", "path": "/srv/a"}]}),
        ("sandbox", {"name": ["b"], "template": template}),
        ("snapshot", {"name": ["s"], "sandbox": ["a"], "volumes": ["data"]}),
    ):
        result = run_task(client, kind, params)
        assert not result.get("failed"), result


def describe_outcome(result: dict[str, Any]) -> str:
    return "failed" if result.get("failed") else "changed" if result["changed"] else "ok"


def describe_outcomes(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the changes and failures of a task and of each of its objects, without names, which may be ids."""
    return [
        (describe_outcome(each), each.get("actions"), (each.get("failure") or {}).get("kind"))
        for each in (result, *result.get("outcomes", ()))
    ]


def is_condition(phrase: str) -> bool:
    """Return whether a phrase of ``unknown`` says that the outcome of a task is unknown, and not only its costs."""
    return phrase.startswith(("only if ", "depends on "))


def make_entries(predicted: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the entries of the plan out of the predicted results. All items of a loop belong to the same task."""
    entries = [
        {**prediction.pop(PLAN_KEY), "task": location.partition("[")[0], "location": location}
        for location, prediction in predicted.items()
        if PLAN_KEY in prediction
    ]
    return mark_dependent_entries(json.loads(json.dumps(entries)))


def apply_predicted(
    client: Client, run_client: Client, play: Iterable[Node], files: PlayFiles, entries: list[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Run a play that may make only the changes that were predicted. Afterwards, ``run_client`` belongs to the run."""
    state = make_initial_state()

    def run_item(location: str, kind: str, params: dict[str, Any]) -> dict[str, Any]:
        if kind in _LISTINGS:  # A listing changes nothing, and needs no plan.
            return run_task(client, kind, params)
        option = make_approved_option(entries, {"task": location.partition("[")[0]}, state)
        result = run_task(run_client, kind, {**params, "approved_plan": option})
        if PLAN_KEY in result:
            update_state(state, result.pop(PLAN_KEY))
        return result

    return run_play(play, files, run_item)


def empty_gateway(url: str) -> None:
    """Remove all sandboxes, snapshots and volumes of a gateway, and wait until they are gone."""
    client = Client(url)
    try:
        wait_until(lambda: _remove_all(client), seconds=120)
    finally:
        client.close()


def _remove_all(client: Client) -> bool:
    """Remove the objects that are not in use. Returns whether there were none."""
    for sandbox in list(client.list_all("/sandboxes")):
        client.delete(f"/sandboxes/{sandbox['sandboxID']}")
    objects: list[tuple[str, str, dict[str, Any]]] = [
        (each["createdAt"], f"/snapshots/{each['snapshotID']}", {}) for each in client.list_all("/snapshots")
    ]
    objects += [
        (each["createdAt"], f"/volumes/{each['name']}", {"withSnapshots": True}) for each in client.list_all("/volumes")
    ]
    for _, path, query in sorted(objects, reverse=True):  # descendants first
        try:
            client.delete(path, **query)
        except Failure as failure:
            if failure.kind not in ("in_use", "not_found"):
                raise
    return not objects
