"""Control groups: limits of machines and volume servers, enforced by the host's kernel.

One group per machine, `<prefix>-sandboxes/<instance>`, and per server, `<prefix>-volumes/<volume>`, at the top of each
hierarchy. The groups are not below the gateway's own service, because systemd empties its group when the service ends,
but machines keep running. Versions 1, 2 and mixtures of both are supported; a missing controller is logged once, and
its limits are not
applied.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.log import Logger

CONTROLLERS = ("memory", "cpu", "pids")
_PERIOD_US = 50_000
_OWN_CPU = 0.5
"""CPUs for QEMU's own threads besides the virtual CPUs: if a busy guest delayed them, captures would take longer."""
_OWN_PIDS = 512
_REMOVE_SECONDS = 0.05

log = Logger("cgroup")


@dataclass(frozen=True)
class _Hierarchy:
    """The hierarchy of one controller. Several controllers may share a mount."""

    mount: Path
    version: int


class Cgroups:
    """The groups of one gateway, identified by ``prefix``, for one ``kind`` of process.

    Missing features of the host never raise an error.
    """

    def __init__(self, prefix: str, kind: str = "sandboxes", *, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._kind = kind
        self._name = f"{prefix}-{kind}"
        self._hierarchies = _hierarchies(mountinfo)
        self._warned: set[str] = set()
        self._left: set[str] = set()
        for controller in CONTROLLERS:
            if controller not in self._hierarchies:
                self._warn_once(controller, "the host has no such cgroup controller")

    def place(self, instance: str, pid: int, *, memory_mb: int, cpus: float) -> None:
        """Put process ``pid`` with all its threads under limits: MiB of memory, CPUs (plus half a CPU for QEMU)."""
        self._retry_left()
        for controller, hierarchy in self._hierarchies.items():
            try:
                self._prepare(controller, hierarchy)
                group = hierarchy.mount / self._name / instance
                group.mkdir(exist_ok=True)
                for file, value in _limits(controller, hierarchy.version, memory_mb, cpus).items():
                    (group / file).write_text(value)
                (group / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                return  # The process has ended; its watcher reports that.
            except OSError as error:
                self._warn_once(controller, f"{error.strerror} ({error.filename})")

    def remove(self, instance: str) -> None:
        """Remove the groups of a machine that has ended. A later call removes groups that are still busy."""
        self._retry_left()
        if not self._try_remove(instance, time.monotonic() + _REMOVE_SECONDS):
            self._left.add(instance)
        self._remove_empty_roots()

    def sweep(self, keep: set[str]) -> None:
        """Remove the groups of machines that are not in ``keep``. Groups with processes remain."""
        found = {
            group.name
            for root in self._roots()
            if root.is_dir()
            for group in root.iterdir()
            if group.is_dir() and group.name not in keep
        }
        for instance in sorted(found):
            if not self._try_remove(instance, time.monotonic()):
                log.warning("a control group is not empty", instance=instance)
        self._remove_empty_roots()

    def memory_bytes(self, instance: str) -> int | None:
        """Return the memory charged to the machine, including page cache; None if unknown."""
        hierarchy = self._hierarchies.get("memory")
        if hierarchy is None:
            return None
        file = "memory.current" if hierarchy.version == 2 else "memory.usage_in_bytes"
        try:
            return int((hierarchy.mount / self._name / instance / file).read_text())
        except (OSError, ValueError):
            return None

    def _prepare(self, controller: str, hierarchy: _Hierarchy) -> None:
        """Create the root group. On version 2, also enable the controller in it and for its children."""
        root = hierarchy.mount / self._name
        root.mkdir(exist_ok=True)
        if hierarchy.version == 2:
            for group in (hierarchy.mount, root):
                switch = group / "cgroup.subtree_control"
                if controller not in switch.read_text().split():
                    switch.write_text(f"+{controller}")

    def _roots(self) -> set[Path]:
        return {hierarchy.mount / self._name for hierarchy in self._hierarchies.values()}

    def _remove_empty_roots(self) -> None:
        for root in self._roots():
            with contextlib.suppress(OSError):
                root.rmdir()

    def _retry_left(self) -> None:
        self._left = {instance for instance in self._left if not self._try_remove(instance, time.monotonic())}

    def _try_remove(self, instance: str, until: float) -> bool:
        """Remove the groups of ``instance``.

        Retries until the time ``until``, because a process leaves its group after its end.
        """
        waiting = {root / instance for root in self._roots()}
        while True:
            waiting = {group for group in waiting if not _remove_group(group)}
            if not waiting or time.monotonic() >= until:
                return not waiting
            time.sleep(0.005)

    def _warn_once(self, controller: str, reason: str) -> None:
        if controller not in self._warned:
            self._warned.add(controller)
            log.warning(f"{self._kind} run without the limits of the controller {controller}", reason=reason)


def _remove_group(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _limits(controller: str, version: int, memory_mb: int, cpus: float) -> dict[str, str]:
    """Return file names and their contents, in the order in which they must be written."""
    quota = str(int((cpus + _OWN_CPU) * _PERIOD_US))
    if controller == "memory":
        return {"memory.max" if version == 2 else "memory.limit_in_bytes": str(memory_mb << 20)}
    if controller == "cpu":
        if version == 2:
            return {"cpu.max": f"{quota} {_PERIOD_US}"}
        return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota}
    return {"pids.max": str(_OWN_PIDS)}


def _hierarchies(mountinfo: Path) -> dict[str, _Hierarchy]:
    """Find the hierarchy of each controller: its version 1 hierarchy if there is one, else version 2."""
    first: dict[str, _Hierarchy] = {}
    second: dict[str, _Hierarchy] = {}
    for line in mountinfo.read_text().splitlines():
        fields = line.split()
        kind, options = fields[fields.index("-") + 1], fields[-1].split(",")
        mount = Path(fields[4])
        if kind == "cgroup":
            first.update({name: _Hierarchy(mount, 1) for name in CONTROLLERS if name in options})
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                offered = (mount / "cgroup.controllers").read_text().split()
                second.update({name: _Hierarchy(mount, 2) for name in CONTROLLERS if name in offered})
    return second | first
