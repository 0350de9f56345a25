"""Limits of jails: rctl rules, where the kernel counts (`kern.racct.enable=1`)."""

from __future__ import annotations

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import Commands
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Resources

_ABSENT = ("No such process",)

log = Logger("rctl")


def rules(jail: str, resources: Resources, processes: int) -> list[str]:
    """``memoryuse`` would be no hard limit; ``pcpu`` is in percent of one processor."""
    limits = {
        "maxproc": str(processes),
        "vmemoryuse": str(resources.memory_mb << 20),
        "pcpu": str(resources.cpus * 100),
    }
    return [f"jail:{jail}:{resource}:deny={amount}" for resource, amount in limits.items()]


def parse_usage(text: str) -> dict[str, int]:
    """Read what ``rctl -u`` prints: ``resource=amount`` a line."""
    pairs = (line.strip().partition("=") for line in text.splitlines())
    return {name: int(amount) for name, _, amount in pairs if amount.isascii() and amount.isdigit()}


class Limits:
    """``processes``: how many a sandbox may have."""

    def __init__(self, run: Commands, processes: int) -> None:
        self._run = run
        self._processes = processes
        self.enabled = False

    async def open(self) -> None:
        """See whether limits can be had; a host without them works, and says so."""
        try:
            self.enabled = (await self._run("sysctl", "-n", "kern.racct.enable")).strip() == "1"
        except BackendFailed as error:
            if "unknown oid" not in error.message:
                raise
            self.enabled = False
        if not self.enabled:
            log.warning(
                "sandboxes have no limits of memory, processors and processes here: "
                "put kern.racct.enable=1 into /boot/loader.conf and restart the machine"
            )

    async def apply(self, jail: str, resources: Resources) -> None:
        """Before the jail is made: its first process is under them."""
        if self.enabled:
            await self._run("rctl", "-a", *rules(jail, resources, self._processes))

    async def remove(self, jail: str) -> None:
        if self.enabled:
            await self._run.unless("rctl", "-r", f"jail:{jail}", absent=_ABSENT)

    async def memory_bytes(self, jail: str) -> int:
        """What is resident of a jail; 0 where nobody counts."""
        if not self.enabled:
            return 0
        return parse_usage(await self._run("rctl", "-u", f"jail:{jail}")).get("memoryuse", 0)

    async def sweep(self, prefix: str, kept: set[str]) -> list[str]:
        """Remove the rules of jails whose names begin with ``prefix`` and are not in ``kept``; returns their names."""
        if not self.enabled:
            return []
        fields = (line.split(":") for line in (await self._run("rctl")).splitlines())
        named = {field[1] for field in fields if len(field) > 2 and field[0] == "jail"}
        strays = sorted(name for name in named - kept if name.startswith(prefix))
        for name in strays:
            await self.remove(name)
        return strays
