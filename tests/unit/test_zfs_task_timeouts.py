"""Test that no task of the collection waits forever for ZFS, whose commands hang if a disk does not respond."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.session import REPOSITORY

_MODULES = ("ansible.builtin.command", "ansible.builtin.shell")
_MAX_SECONDS = 120


class _Loader(yaml.SafeLoader):
    """A loader that ignores Ansible's tags, such as `!unsafe`."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))


def _find_tasks(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the tasks that run a command, in plays, task lists and blocks."""
    if isinstance(data, list):
        for item in data:
            yield from _find_tasks(item)
    elif isinstance(data, dict):
        if any(module in data for module in _MODULES):
            yield data
        for key in ("tasks", "pre_tasks", "post_tasks", "handlers", "block", "rescue", "always"):
            yield from _find_tasks(data.get(key))


def _runs_zfs(task: dict[str, Any]) -> bool:
    """Return whether a task runs `zfs` or `zpool`. `lzc` limits the time of its commands itself."""
    text = " ".join(str(task[module]) for module in _MODULES if module in task)
    return re.search(r"(?<![\w./-])(zfs|zpool)(?![\w./-])", text) is not None


def _find_zfs_tasks() -> dict[str, dict[str, Any]]:
    paths = [
        path
        for folder in ("roles/*/tasks", "roles/*/handlers", "playbooks", "molecule")
        for path in REPOSITORY.glob(f"{folder}/**/*.yml")
    ]
    assert len(paths) > 50
    return {
        f"{path.relative_to(REPOSITORY)}: {task.get('name')}": task
        for path in paths
        for task in _find_tasks(yaml.load(path.read_text(), _Loader))
        if _runs_zfs(task)
    }


_ZFS_TASKS = _find_zfs_tasks()


def test_the_tasks_that_run_zfs_are_found() -> None:
    files = {name.partition(":")[0] for name in _ZFS_TASKS}
    assert {"roles/jail_zfs_host/tasks/preflight.yml", "playbooks/tasks/demo_pool.yml"} <= files


@pytest.mark.parametrize("name", _ZFS_TASKS)
def test_a_task_that_runs_zfs_has_a_timeout(name: str) -> None:
    assert 0 < _ZFS_TASKS[name].get("timeout", 0) <= _MAX_SECONDS
