"""Show plans and comparisons of plans: tables for people, and JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from sandbox_gateway.cli import formats, render
from sandbox_gateway.cli.plan_comparison import ChangeDifference, Comparison, TaskDifference, VersionDifference
from sandbox_gateway.cli.plan_file import (
    CHANGED,
    CREATED,
    REMOVED,
    ROLLED_BACK,
    Entry,
    Kind,
    Plan,
    PlannedChange,
    iterate_changes,
)
from sandbox_gateway.control_characters import remove_control_characters

_KINDS = get_args(Kind)
_DIGEST_DIGITS = 12
_TOTAL_KEYS = {CREATED: "create", CHANGED: "change", REMOVED: "remove", ROLLED_BACK: "roll_back"}


def print_plan(plan: Plan) -> None:
    """Print the changes by gateway and kind, the totals, the uncertainties, and whether the plan can be applied."""
    changes = sorted(_list_changes(plan), key=lambda planned_change: _KINDS.index(planned_change.change.kind))
    for gateway, url in plan.gateways.items():
        rows = [
            _build_change_row(planned_change) for planned_change in changes if planned_change.entry.gateway == gateway
        ]
        if rows:
            _print_section(f"Gateway {_to_one_line(url)}:", ("KIND", "CHANGE", "NAME", "VERB", "TASK", "HOST"), rows)
    if changes:
        print(f"Plan: {_format_totals(plan)}.")
    else:
        print("The plan contains no changes.")
    _print_list(
        "Unknown until the run:", (f"{text}: {_format_task(entry)}" for entry in plan.entries for text in entry.unknown)
    )
    _print_list(
        "Predicted failures:",
        (
            f"{_format_task(entry)} on {entry.host}: {entry.failure.message}"
            for entry in plan.entries
            if entry.failure is not None
        ),
    )
    print()
    _print_status(plan)


def convert_plan(plan: Plan) -> dict[str, Any]:
    """Return the contents of the file, with the totals and whether the plan can be applied."""
    totals = {_TOTAL_KEYS[sign]: count for sign, count in _count_signs(plan).items()}
    return {
        **plan.model_dump(),
        "expired": plan.is_expired,
        "applicable": plan.is_applicable,
        "totals": {**totals, "costs": _sum_costs(plan)},
    }


def print_comparison(comparison: Comparison, old: Plan, new: Plan) -> None:
    """Print the differences between two plans, or that there are none."""
    if comparison.is_equal:
        print("The plans are equal.")
        return
    urls = {gateway: _to_one_line(url) for gateway, url in (*old.gateways.items(), *new.gateways.items())}
    _print_section(
        "Changes:",
        ("PLAN", "DIFFERENT", "KIND", "CHANGE", "NAME", "VERB", "TASK", "HOST", "GATEWAY"),
        (_build_change_difference_row(difference, urls) for difference in comparison.changes),
    )
    _print_section(
        "Versions of objects:",
        ("OBJECT", "OLD VERSION", "NEW VERSION", "GATEWAY"),
        (_build_version_difference_row(difference, urls) for difference in comparison.versions),
    )
    _print_section(
        "Tasks:",
        ("PLAN", "DIFFERENT", "TASK", "HOST", "GATEWAY"),
        (_build_task_difference_row(difference, urls) for difference in comparison.tasks),
    )
    if comparison.properties:
        print(f"Also different: {', '.join(comparison.properties)}.\n")
    print("The plans differ.")


def convert_comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "equal": comparison.is_equal,
        "changes": [
            {
                "plan": difference.side,
                "different": list(difference.properties),
                "gateway": difference.change.entry.gateway,
                "kind": difference.change.change.kind,
                "change": difference.change.sign,
                "name": difference.change.change.name,
                "verb": difference.change.verb,
                **_convert_task(difference.change.entry),
            }
            for difference in comparison.changes
        ],
        "versions": [
            {
                "gateway": difference.gateway,
                "object": difference.path,
                "old": difference.old,
                "new": difference.new,
            }
            for difference in comparison.versions
        ],
        "tasks": [
            {
                "plan": difference.side,
                "different": list(difference.properties),
                "gateway": difference.entry.gateway,
                **_convert_task(difference.entry),
            }
            for difference in comparison.tasks
        ],
        "different": list(comparison.properties),
    }


def _convert_task(entry: Entry) -> dict[str, str]:
    return {"task": entry.task, "path": entry.path, "host": entry.host}


def _print_section(title: str, headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    if rows := list(rows):
        print(title)
        render.print_table(headings, rows)
        print()


def _print_list(title: str, lines: Iterable[str]) -> None:
    """Print a title and the lines below it, each once. Print nothing if there are no lines."""
    if unique_lines := dict.fromkeys(map(_to_one_line, lines)):
        print(f"\n{title}")
        for line in unique_lines:
            print(f"  {line}")


def _print_status(plan: Plan) -> None:
    playbooks = f" of {', '.join(plan.playbooks)}" if plan.playbooks else ""
    subject = _to_one_line(f"The plan {plan.digest[:_DIGEST_DIGITS]}{playbooks}, made at {plan.created_at},")
    if plan.is_applicable:
        time_left = formats.format_time_left(plan.expires_at).removeprefix("ends ")
        print(f"{subject} can be applied until {plan.expires_at} ({time_left}).")
        return
    print(f"{subject} cannot be applied:")
    if plan.is_expired:
        print(f"  it expired at {plan.expires_at} ({formats.format_age(plan.expires_at)} ago)")
    for problem in plan.problems:
        print(f"  {_to_one_line(problem)}")
    print("To get a plan that can be applied, run `ansible-playbook --check` again.")


def _build_change_row(planned_change: PlannedChange) -> tuple[str, ...]:
    change, entry = planned_change.change, planned_change.entry
    cells = (change.kind, planned_change.sign, change.name, planned_change.verb, _format_task(entry), entry.host)
    return tuple(map(_to_one_line, cells))


def _build_change_difference_row(difference: ChangeDifference, urls: Mapping[str, str]) -> tuple[str, ...]:
    properties = _to_one_line(", ".join(difference.properties))
    return (
        difference.side,
        properties or "-",
        *_build_change_row(difference.change),
        urls[difference.change.entry.gateway],
    )


def _build_version_difference_row(difference: VersionDifference, urls: Mapping[str, str]) -> tuple[str, ...]:
    versions = (_to_one_line(version) or "does not exist" for version in (difference.old, difference.new))
    return (_to_one_line(difference.path), *versions, urls[difference.gateway])


def _build_task_difference_row(difference: TaskDifference, urls: Mapping[str, str]) -> tuple[str, ...]:
    entry = difference.entry
    properties = ", ".join(difference.properties)
    return (difference.side, properties or "-", _format_task(entry), _to_one_line(entry.host), urls[entry.gateway])


def _list_changes(plan: Plan) -> list[PlannedChange]:
    return [planned_change for entry in plan.entries for planned_change in iterate_changes(entry)]


def _count_signs(plan: Plan) -> dict[str, int]:
    """Return the number of changes by sign, including signs that the plan does not have."""
    counts = Counter(planned_change.sign for planned_change in _list_changes(plan))
    return {sign: counts[sign] for sign in _TOTAL_KEYS}


def _sum_costs(plan: Plan) -> dict[str, float]:
    """Return the sum of each cost that is known for at least one task."""
    costs: dict[str, float] = {}
    for entry in plan.entries:
        for key, amount in entry.costs.items():
            costs[key] = costs.get(key, 0) + amount
    return costs


def _format_totals(plan: Plan) -> str:
    """Format the totals as the callback does: "1 to create; 256 MiB of memory, about 12 MiB of disk"."""
    counts = ", ".join(
        f"{count} to {_TOTAL_KEYS[sign].replace('_', ' ')}" for sign, count in _count_signs(plan).items() if count
    )
    sums = _sum_costs(plan)
    costs = []
    if memory_mb := sums.get("memory_mb", 0):
        costs.append(_format_amount(f"{formats.format_size(abs(memory_mb) * (1 << 20))} of memory", memory_mb))
    if disk_bytes := sums.get("disk_bytes", 0):
        costs.append(_format_amount(f"about {formats.format_size(abs(disk_bytes))} of disk", disk_bytes))
    if pause_count := sum(1 for entry in plan.entries if entry.costs.get("pause_ms")):
        pauses = "1 pause of about" if pause_count == 1 else f"{pause_count} pauses, in total about"
        costs.append(f"{pauses} {sums['pause_ms']:.1f} ms")
    return "; ".join(filter(None, (counts, ", ".join(costs))))


def _format_amount(text: str, amount: float) -> str:
    return f"{text} freed" if amount < 0 else text


def _format_task(entry: Entry) -> str:
    return _to_one_line(f"{entry.task} ({entry.path})" if entry.path else entry.task)


def _to_one_line(text: str) -> str:
    """Return text from the file without anything that affects the terminal, and without line breaks."""
    return " ".join(remove_control_characters(text).split())
