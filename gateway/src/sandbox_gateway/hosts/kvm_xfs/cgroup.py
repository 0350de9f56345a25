"""Limit the resources of machines and volume servers with control groups.

Each machine has the group `<prefix>-sandboxes/<instance>`, and each server the group `<prefix>-volumes/<volume>`, at
the top of each hierarchy. The groups are not inside the group of the gateway's service: systemd kills all processes
there when the service stops, but machines must keep running. cgroup versions 1 and 2 and mixtures of both are
supported. The limits of a missing controller are not applied; this is logged once.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.log import Logger

CONTROLLERS = ("memory", "cpu", "pids")
_PERIOD_US = 50_000
_OVERHEAD_CPUS = 0.5
"""CPUs for QEMU's own threads, in addition to the virtual CPUs, so that a busy guest does not slow down captures."""
_MAX_PIDS = 512
_REMOVE_TIMEOUT_SECONDS = 0.05

log = Logger("cgroup")


@dataclass(frozen=True)
class _Hierarchy:
    """The cgroup hierarchy of one controller. Several controllers may share a mount."""

    mount: Path
    version: int


class Cgroups:
    """Manages the groups of one gateway, identified by ``prefix``, for one ``kind`` of process.

    Features that the host lacks are skipped without an error.
    """

    def __init__(self, prefix: str, kind: str = "sandboxes", *, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._kind = kind
        self._name = f"{prefix}-{kind}"
        self._hierarchies = _find_hierarchies(mountinfo)
        self._warned_controllers: set[str] = set()
        self._busy_instances: set[str] = set()
        for controller in CONTROLLERS:
            if controller not in self._hierarchies:
                self._warn_once(controller, "the host does not have this cgroup controller")

    def limit(self, instance: str, pid: int, *, memory_mb: int, cpus: float) -> None:
        """Limit the process ``pid`` to ``memory_mb`` MiB of memory and ``cpus`` CPUs, plus half a CPU of overhead."""
        self._retry_removals()
        for controller, hierarchy in self._hierarchies.items():
            try:
                self._prepare_root(controller, hierarchy)
                group = hierarchy.mount / self._name / instance
                group.mkdir(exist_ok=True)
                for file, value in _format_limits(controller, hierarchy.version, memory_mb, cpus).items():
                    (group / file).write_text(value)
                (group / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                return  # The process has exited, which its watcher reports.
            except OSError as error:
                self._warn_once(controller, f"{error.strerror} ({error.filename})")

    def remove(self, instance: str) -> None:
        """Remove the groups of a machine that has stopped. If a group is still busy, a later call removes it."""
        self._retry_removals()
        if not self._try_remove(instance, time.monotonic() + _REMOVE_TIMEOUT_SECONDS):
            self._busy_instances.add(instance)
        self._remove_empty_roots()

    def sweep(self, kept_instances: set[str]) -> None:
        """Remove the groups of machines that are not in ``kept_instances``. Groups that contain processes remain."""
        unknown_instances = {
            group.name
            for root in self._list_roots()
            if root.is_dir()
            for group in root.iterdir()
            if group.is_dir() and group.name not in kept_instances
        }
        for instance in sorted(unknown_instances):
            if not self._try_remove(instance, time.monotonic()):
                log.warning("a control group is not empty", instance=instance)
        self._remove_empty_roots()

    def read_memory_bytes(self, instance: str) -> int | None:
        """Return the bytes of memory charged to the machine, including page cache, or None if they are unknown."""
        hierarchy = self._hierarchies.get("memory")
        if hierarchy is None:
            return None
        file = "memory.current" if hierarchy.version == 2 else "memory.usage_in_bytes"
        try:
            return int((hierarchy.mount / self._name / instance / file).read_text())
        except (OSError, ValueError):
            return None

    def _prepare_root(self, controller: str, hierarchy: _Hierarchy) -> None:
        """Create the root group. In version 2, also enable the controller for the groups inside it."""
        root = hierarchy.mount / self._name
        root.mkdir(exist_ok=True)
        if hierarchy.version == 2:
            for group in (hierarchy.mount, root):
                control_file = group / "cgroup.subtree_control"
                if controller not in control_file.read_text().split():
                    control_file.write_text(f"+{controller}")

    def _list_roots(self) -> set[Path]:
        return {hierarchy.mount / self._name for hierarchy in self._hierarchies.values()}

    def _remove_empty_roots(self) -> None:
        for root in self._list_roots():
            with contextlib.suppress(OSError):
                root.rmdir()

    def _retry_removals(self) -> None:
        now = time.monotonic()
        self._busy_instances = {instance for instance in self._busy_instances if not self._try_remove(instance, now)}

    def _try_remove(self, instance: str, deadline: float) -> bool:
        """Remove the groups of ``instance``. Returns whether all were removed.

        Retries until ``deadline``, because a process leaves its group only some time after it has exited.
        """
        remaining_groups = {root / instance for root in self._list_roots()}
        while True:
            remaining_groups = {group for group in remaining_groups if not _remove_group(group)}
            if not remaining_groups or time.monotonic() >= deadline:
                return not remaining_groups
            time.sleep(0.005)

    def _warn_once(self, controller: str, reason: str) -> None:
        if controller not in self._warned_controllers:
            self._warned_controllers.add(controller)
            log.warning(f"{self._kind} run without the limits of the controller {controller}", reason=reason)


def _remove_group(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _format_limits(controller: str, version: int, memory_mb: int, cpus: float) -> dict[str, str]:
    """Return the contents of the files that set a controller's limits, in the order in which to write them."""
    quota = str(int((cpus + _OVERHEAD_CPUS) * _PERIOD_US))
    if controller == "memory":
        return {"memory.max" if version == 2 else "memory.limit_in_bytes": str(memory_mb << 20)}
    if controller == "cpu":
        if version == 2:
            return {"cpu.max": f"{quota} {_PERIOD_US}"}
        return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota}
    return {"pids.max": str(_MAX_PIDS)}


def _find_hierarchies(mountinfo: Path) -> dict[str, _Hierarchy]:
    """Return the hierarchy of each available controller. If a controller has two, version 1 takes precedence."""
    version_1: dict[str, _Hierarchy] = {}
    version_2: dict[str, _Hierarchy] = {}
    for line in mountinfo.read_text().splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        mount = Path(fields[4])
        if kind == "cgroup":
            version_1.update({name: _Hierarchy(mount, 1) for name in CONTROLLERS if name in options})
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                available_controllers = (mount / "cgroup.controllers").read_text().split()
                version_2.update({name: _Hierarchy(mount, 2) for name in CONTROLLERS if name in available_controllers})
    return version_2 | version_1
