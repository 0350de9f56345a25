"""Compare what a plan session predicts for a play with what the run does: results of tasks, and states of gateways."""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._approval import PREDICTED_FAILURE
from ansible_collections.grove.sandbox.plugins.module_utils._client import ID_PATTERN, PLANNED_ID_PREFIX, Client
from ansible_collections.grove.sandbox.plugins.module_utils._sandbox import TIMEOUT_TOLERANCE_SECONDS

RESULT_LIST_KEYS = ("sandboxes", "snapshots", "templates", "volumes", "backups")
MAX_UNKNOWN_SHARE = 0.2
"""Bound for the share of unknown values. The long run has measured 6 %; a play that only forks has up to 17 %."""
_TIME_KEYS = ("createdat", "startedat", "endat", "updatedat", "expiresat")
_MEMORY_KEY = "memory"
"""The capture method, which the host chooses based on its measurements. "none" is always known."""
_READY_KEY = "ready"
"""How many forks are ready: the gateway starts them in the background, after the task."""
_MEASURED_KEYS = ("usedmb", "pausems", _MEMORY_KEY, "memorybyteswritten", "diskbytesunique")
# The host chooses them depending on its own state: an address from its pool, and names that contain ids.
_HOST_KEYS = ("address", "dataset", "zfssnapshot")
UNKNOWN_KEYS = frozenset((*_TIME_KEYS, *_MEASURED_KEYS, *_HOST_KEYS, _READY_KEY))
"""The only keys that may have unknown values, apart from ids and `diverged`. In lower case, without underscores."""
_GENERATION_KEYS = ("generation", "ownChanges")
"""In a plan session and in an applied run, generations do not contain the changes of the run itself."""
_DIVERGED_KEY = "diverged"
_TIMEOUT_KEY = "timeout"
"""The timeout of a sandbox in seconds, which modules compute from two times."""
_SETTLE_TIMEOUT_SECONDS = 20
State = dict[str, list[dict[str, Any]]]


class Counts:
    """The number of compared values (``known``) and of unknown values, by key."""

    def __init__(self) -> None:
        self.known: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    @property
    def unknown_share(self) -> float:
        return self.unknown.total() / max(1, self.unknown.total() + self.known.total())

    def check_unknown_share(self) -> None:
        """Check that most values were known."""
        assert self.unknown_share < MAX_UNKNOWN_SHARE, str(self)

    def __str__(self) -> str:
        keys = ", ".join(f"{key} {count}" for key, count in self.unknown.most_common())
        return f"{self.known.total()} values equal, {self.unknown.total()} unknown ({self.unknown_share:.1%}: {keys})"


class PlanComparison:
    """Compares the predictions for one play with its run. All checks share a one-to-one mapping of planned to real ids.

    ``opened_at``: the time at which the plan session began, in the gateway's format. ``has_approved_plan``: whether the
    run may only do what the session predicted. Such a run does not try actions that the session has refused, so only
    runs without a plan show whether refusals are predicted correctly.
    """

    def __init__(
        self, opened_at: str, result_counts: Counts, state_counts: Counts, *, has_approved_plan: bool = False
    ) -> None:
        self._opened_at = opened_at
        self._has_approved_plan = has_approved_plan
        self._result_counts = result_counts
        self._state_counts = state_counts
        self._counts = result_counts
        self._real_ids: dict[str, str] = {}
        self._planned_ids: dict[str, str] = {}

    def check_result(self, planned: dict[str, Any], actual: dict[str, Any], location: str) -> None:
        """Check that a task had the predicted result, except for unknown values. Checks each item of a loop."""
        self._counts = self._result_counts
        if self._has_approved_plan:
            actual = restore_predicted_failures(planned, actual)
        assert bool(planned.get("failed")) == bool(actual.get("failed")), (location, planned, actual)
        for key in ("changed", "failure", "diff", "outcomes", *RESULT_LIST_KEYS):
            assert (key in planned) == (key in actual), (location, key, planned, actual)
            values = planned.get(key), actual.get(key)
            if key in RESULT_LIST_KEYS and "outcomes" not in planned and key in planned:
                # A list of all objects, in the order of their creation, which differs for simultaneous forks.
                values = _sort_by_name(planned[key], "name"), _sort_by_name(actual[key], "name")
            self._check(*values, key, f"{location}: {key}")
        planned_items, actual_items = planned.get("results") or [], actual.get("results") or []
        for number, (planned_item, actual_item) in enumerate(zip(planned_items, actual_items, strict=True)):
            self.check_result(planned_item, actual_item, f"{location}, item {number}")

    def check_state(self, read_planned: Callable[[], State], read_actual: Callable[[], State]) -> None:
        """Check that the gateway has the objects of the session, with the same properties and relations.

        Reads both states again for up to 20 seconds, because gateways remove unused objects in the background.
        """
        deadline = time.monotonic() + _SETTLE_TIMEOUT_SECONDS
        while True:
            attempt = copy.deepcopy(self)
            attempt._counts = attempt._state_counts
            try:
                attempt._check_states(read_planned(), read_actual())
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            else:
                self._state_counts.known.update(attempt._counts.known - self._state_counts.known)
                self._state_counts.unknown.update(attempt._counts.unknown - self._state_counts.unknown)
                return
            time.sleep(0.1)

    def _check_states(self, planned: State, actual: State) -> None:
        # The gateway itself, unlike the modules, does not hide what it cannot know in a session.
        planned = {kind: [self._hide_unknown(each) for each in objects] for kind, objects in planned.items()}
        if not self._has_approved_plan:
            planned, actual = _remove_generations(planned), _remove_generations(actual)
        for kind, planned_objects in planned.items():
            self._check(len(planned_objects), len(actual[kind]), kind, f"number of {kind}")
            for planned_object, actual_object in zip(planned_objects, actual[kind], strict=True):
                name = planned_object.get("name") or planned_object.get("names")
                self._check(planned_object, actual_object, kind, f"{kind}: {name}")

    def _hide_unknown(self, planned_object: dict[str, Any]) -> dict[str, Any]:
        """Return an object of a session with None for the values that only the run can know.

        These are measurements of objects that the session has created, values that the host chooses for objects that it
        has created or started, and how many forks are ready. All other values must equal the values of the run.
        """
        ids = [planned_object.get(key) or "" for key in ("sandboxID", "snapshotID", "templateID")]
        own_id = next(filter(None, ids), "")
        is_new = own_id.startswith(PLANNED_ID_PREFIX) or (planned_object.get("createdAt") or "") > self._opened_at
        is_started = is_new or (planned_object.get("startedAt") or "") > self._opened_at
        hidden_keys = {*(_MEASURED_KEYS if is_new else ()), *(_HOST_KEYS if is_started else ())}
        if (planned_object.get("prewarm") or {}).get("target"):
            hidden_keys.add(_READY_KEY)
        return {key: _hide(value, key.lower(), hidden_keys) for key, value in planned_object.items()}

    def _check(self, planned: Any, actual: Any, key: str, location: str) -> None:
        context = (location, planned, actual)
        normalized_key = key.replace("_", "").lower()
        if isinstance(planned, dict):
            assert isinstance(actual, dict), context
            self._check_dict(planned, actual, location)
        elif isinstance(planned, list):
            assert isinstance(actual, list) and len(planned) == len(actual), context
            for number, (value, actual_value) in enumerate(zip(planned, actual, strict=True)):
                self._check(value, actual_value, key, f"{location}[{number}]")
        elif planned is None and actual is not None:
            assert normalized_key in UNKNOWN_KEYS, context
            # The modules hide the capture method of each new snapshot.
            assert self._counts is self._result_counts or (key, actual) != (_MEMORY_KEY, "none"), context
            self._counts.unknown[normalized_key] += 1
        elif isinstance(planned, str) and isinstance(actual, str):
            self._check_text(planned, actual, normalized_key, context)
        else:
            self._check_value(planned, actual, normalized_key, context)

    def _check_dict(self, planned: dict[str, Any], actual: dict[str, Any], location: str) -> None:
        missing_keys = {key for key in actual if key not in planned and key.lower() in UNKNOWN_KEYS}
        actual_keys = [key for key in actual if key not in missing_keys]
        assert len(planned) == len(actual_keys), (location, planned, actual)
        self._counts.unknown.update(key.lower() for key in missing_keys)
        for (key, value), actual_key in zip(planned.items(), actual_keys, strict=True):
            self._check_key(key, actual_key, (location, planned, actual))
            actual_value = actual[actual_key]
            if key == _DIVERGED_KEY and value != actual_value:
                # Only the run can know whether the guest writes to its disk before the run.
                assert value is None and planned.get("state", "running") == "running", (location, planned, actual)
                self._counts.unknown[_DIVERGED_KEY] += 1
            else:
                self._check(value, actual_value, key, f"{location}.{key}")

    def _check_key(self, planned: str, actual: str, context: Any) -> None:
        """Check that two keys are equal, except that they contain different ids of the same object."""
        if PLANNED_ID_PREFIX in planned:
            self._check_ids_in_text(planned, actual, context)
        else:
            assert planned == actual, context

    def _check_text(self, planned: str, actual: str, key: str, context: Any) -> None:
        if PLANNED_ID_PREFIX in planned:
            # A run with a plan quotes the messages of predicted failures, which contain planned ids.
            if not (self._has_approved_plan and planned == actual):
                self._check_ids_in_text(planned, actual, context)
            self._counts.unknown["ids"] += 1
        elif ID_PATTERN.fullmatch(planned):
            self._check_id(planned, actual, context)
            self._counts.known[key] += 1
        else:
            self._check_value(planned, actual, key, context)

    def _check_ids_in_text(self, planned: str, actual: str, context: Any) -> None:
        planned_parts, actual_parts = _split_at_ids(planned), _split_at_ids(actual)
        assert planned_parts[::2] == actual_parts[::2], context
        for planned_id, actual_id in zip(planned_parts[1::2], actual_parts[1::2], strict=True):
            self._check_id(planned_id, actual_id, context)

    def _check_id(self, planned: str, actual: str, context: Any) -> None:
        """Check that two ids stand for the same object. An id that existed before the play stands for itself."""
        is_new = planned.startswith(PLANNED_ID_PREFIX)
        assert ID_PATTERN.fullmatch(actual) and (is_new or planned == actual), context
        assert self._real_ids.setdefault(planned, actual) == actual, (self._real_ids[planned], context)
        assert self._planned_ids.setdefault(actual, planned) == planned, (self._planned_ids[actual], context)

    def _check_value(self, planned: Any, actual: Any, key: str, context: Any) -> None:
        if planned == actual:
            self._counts.known[key] += 1
            return
        if key in _TIME_KEYS:
            assert isinstance(planned, str) and isinstance(actual, str), context
            assert min(planned, actual) > self._opened_at, context
        else:
            assert key == _TIMEOUT_KEY and abs(planned - actual) <= TIMEOUT_TOLERANCE_SECONDS, context
        self._counts.unknown[key] += 1


def restore_predicted_failures(planned: dict[str, Any], actual: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run, with the predicted failures where it says that the plan predicts a failure.

    Only a run with an approved plan says this.
    """

    def restore(predicted: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        failure, predicted_failure = result.get("failure"), predicted.get("failure")
        if not failure or not predicted_failure or PREDICTED_FAILURE not in failure["message"]:
            return result
        assert predicted_failure["message"] in failure["message"], (predicted, result)
        return {**result, "failure": predicted_failure}

    result = restore(planned, actual)
    if result is not actual:
        assert actual["failure"]["kind"] == planned["failure"]["kind"], (planned, actual)
    if "outcomes" in planned and "outcomes" in result and len(planned["outcomes"]) == len(result["outcomes"]):
        result = {**result, "outcomes": [*map(restore, planned["outcomes"], result["outcomes"])]}
    return result


def _hide(value: Any, key: str, hidden_keys: Container[str]) -> Any:
    """Return a value with None in place of all values of ``hidden_keys`` that may be unknown."""
    if isinstance(value, dict):
        return {each: _hide(item, each.lower(), hidden_keys) for each, item in value.items()}
    return None if key in hidden_keys and (key, value) != (_MEMORY_KEY, "none") else value


def _remove_generations(state: State) -> State:
    return {
        kind: [{key: value for key, value in each.items() if key not in _GENERATION_KEYS} for each in objects]
        for kind, objects in state.items()
    }


def _split_at_ids(text: str) -> list[str]:
    """Return the parts of a text: text, id, text, id, …, text."""
    return re.split(rf"\b({ID_PATTERN.pattern})\b", text)


def read_state(client: Client) -> State:
    """Return all objects that the gateway shows, without secrets. In equal states, the objects have the same order."""
    sandboxes = _sort_by_name(client.list_all("/sandboxes"), "name")
    snapshots = [client.get(f"/snapshots/{each['snapshotID']}") for each in client.list_all("/snapshots")]
    volumes = sorted(client.list_all("/volumes"), key=lambda each: each["name"])
    for snapshot in snapshots:
        snapshot["users"] = _sort_by_name(snapshot.get("users") or [], "name")
        snapshot["volumes"] = _sort_by_name(snapshot["volumes"], "name")
    for volume in volumes:
        volume["mounts"] = _sort_by_name(volume["mounts"], "sandboxName")
    return {
        "sandboxes": sandboxes,
        "snapshots": _sort_by_name(snapshots, "names"),
        "templates": _sort_by_name(client.list_all("/templates"), "names"),
        "volumes": volumes,
        "volume snapshots": [
            snapshot
            for volume in volumes
            for snapshot in _sort_by_name(client.list_all(f"/volumes/{volume['name']}/snapshots"), "name")
        ],
    }


def _sort_by_name(objects: Iterable[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Sort objects by name without ids. Objects with the same name, or none, stay in the order of their creation."""
    return sorted(objects, key=lambda each: _split_at_ids(str(each[key]))[::2])
