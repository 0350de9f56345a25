"""Limit the resources of jails with rctl, which requires `kern.racct.enable=1`."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Resources

_JAILS_PER_COMMAND = 200
_THREADS_PER_PROCESS = 4
_FILE_TABLE_SHARES = 4
_ABSENT_MESSAGES = ("No such process",)

log = Logger("rctl")


def format_rules(jail: str, resources: Resources, processes: int, max_files: int) -> list[str]:
    """Return the rctl rules of a jail. ``max_files``: the size of the host's table of open files.

    Memory is limited by ``vmemoryuse``, because ``memoryuse`` is not a hard limit. ``vmemoryuse`` does not include the
    kernel's memory for threads, and all jails share the table of open files, so both are limited too. ``pcpu`` is in
    percent of one processor.
    """
    limits = {
        "maxproc": str(processes),
        "nthr": str(processes * _THREADS_PER_PROCESS),
        "openfiles": str(max_files // _FILE_TABLE_SHARES),
        "vmemoryuse": str(resources.memory_mb << 20),
        "pcpu": str(resources.cpus * 100),
    }
    return [f"jail:{jail}:{resource}:deny={amount}" for resource, amount in limits.items()]


def parse_usage(text: str) -> dict[str, int]:
    """Parse the output of ``rctl -u``, which consists of lines ``resource=amount``."""
    pairs = (line.strip().partition("=") for line in text.splitlines())
    return {name: int(amount) for name, _, amount in pairs if amount.isascii() and amount.isdigit()}


def parse_usages(text: str) -> list[dict[str, int]]:
    """Parse the output of ``rctl -u`` for several jails, which lists the same resources in the same order for each."""
    usages: list[dict[str, int]] = []
    for line in text.splitlines():
        usage = parse_usage(line)
        if not usages or usage.keys() & usages[-1].keys():
            usages.append({})
        usages[-1].update(usage)
    return usages


class Limits:
    """Manages the limits of this gateway's jails, whose names begin with ``prefix``.

    ``processes``: the maximum number of processes in each sandbox.
    """

    def __init__(self, run: CommandRunner, prefix: str, processes: int) -> None:
        self._run = run
        self._prefix = prefix
        self._processes = processes
        self._max_files = 0
        self.is_enabled = False

    async def open(self) -> None:
        """Check whether the kernel supports limits. If it does not, log a warning and run jails without limits."""
        try:
            self.is_enabled = (await self._run("sysctl", "-n", "kern.racct.enable")).strip() == "1"
        except BackendFailed as error:
            if "unknown oid" not in error.message:
                raise
            self.is_enabled = False
        if not self.is_enabled:
            log.warning(
                "sandboxes have no limits on memory, processors, processes or open files: "
                "add kern.racct.enable=1 to /boot/loader.conf and restart the machine"
            )
            return
        self._max_files = int(await self._run("sysctl", "-n", "kern.maxfiles"))

    async def apply(self, jail: str, resources: Resources) -> None:
        """Set the limits of a jail. Call this before the jail is created, so that they apply to the first process."""
        if self.is_enabled:
            await self._run("rctl", "-a", *format_rules(jail, resources, self._processes, self._max_files))

    async def remove(self, jail: str) -> None:
        if self.is_enabled:
            await self._run.run_removal("rctl", "-r", f"jail:{jail}", absent_messages=_ABSENT_MESSAGES)

    async def read_memory_bytes(self, jail: str) -> int:
        """Return the resident memory of a jail, in bytes, or 0 if the kernel does not measure it."""
        if not self.is_enabled:
            return 0
        return parse_usage(await self._run("rctl", "-u", f"jail:{jail}")).get("memoryuse", 0)

    async def read_usages(self, jails: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return the resource usage of each jail, or an empty mapping if the kernel does not measure it."""
        usages: list[dict[str, int]] = []
        for start in range(0, len(jails) if self.is_enabled else 0, _JAILS_PER_COMMAND):
            batch = jails[start : start + _JAILS_PER_COMMAND]
            batch_usages = parse_usages(await self._run("rctl", "-u", *(f"jail:{jail}" for jail in batch)))
            if len(batch_usages) != len(batch):
                raise BackendFailed(
                    f"`rctl -u` returned the usage of {len(batch_usages)} jails instead of {len(batch)}"
                )
            usages += batch_usages
        return dict(zip(jails, usages, strict=True)) if usages else {jail: {} for jail in jails}

    async def sweep(self, in_use: set[str]) -> list[str]:
        """Remove the rules of this gateway's jails that are not in ``in_use``. Returns the names of these jails."""
        if not self.is_enabled:
            return []
        rules = (line.split(":") for line in (await self._run("rctl")).splitlines())
        limited_jails = {rule[1] for rule in rules if len(rule) > 2 and rule[0] == "jail"}
        stray_jails = sorted(name for name in limited_jails - in_use if name.startswith(f"{self._prefix}-"))
        for name in stray_jails:
            await self.remove(name)
        return stray_jails
