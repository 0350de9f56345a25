"""Keep track of the machines of running sandboxes, and of the numbers that determine their addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.errors import Busy, Conflict
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge, Epair
from sandbox_gateway.records import Sandbox


@dataclass
class Machine:
    """A jail that exists, or that stopped on its own and has not been cleaned up yet."""

    jail: str
    epair: Epair
    root: Path
    is_running: bool = False
    has_answered: bool = False
    """Whether a probe has reached the agent. Until then, the machine counts as starting."""
    has_ended: bool = False


class MachineRegister:
    """Machines, keyed by the instance of their sandbox. Each has a unique number, which determines its address."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._machines: dict[str, Machine] = {}
        self._numbers: set[int] = set()
        self._next_offset = 0

    def __contains__(self, instance: object) -> bool:
        return instance in self._machines

    def __len__(self) -> int:
        return len(self._machines)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def items(self) -> list[tuple[str, Machine]]:
        return list(self._machines.items())

    def get(self, instance: str) -> Machine | None:
        return self._machines.get(instance)

    def require_running(self, sandbox: Sandbox) -> Machine:
        """Return the machine of a sandbox. Raises Conflict if none is running."""
        machine = self._machines.get(sandbox.instance)
        if machine is None or machine.has_ended:
            raise Conflict(f"sandbox {sandbox.id} has no running jail: resume it first")
        return machine

    def reserve(self, instance: str, jail: str, root: Path) -> Machine:
        """Add the machine of a jail that is about to start, with an unused number. Raises Busy if there is none."""
        machine = Machine(jail, self._bridge.epair(self._choose_number()), root)
        self._numbers.add(machine.epair.number)
        self._machines[instance] = machine
        return machine

    def _choose_number(self) -> int:
        """Return the next unused number in cyclic order, so that addresses are reused as late as possible."""
        for step in range(self._bridge.capacity):
            number = (self._next_offset + step) % self._bridge.capacity + 2
            if number not in self._numbers:
                self._next_offset = number - 1
                return number
        raise Busy(
            f"all {self._bridge.capacity} addresses of {self._bridge.subnet} are in use: "
            "remove sandboxes, or set [network] subnet to a larger network"
        )

    def adopt(self, instance: str, jail: str, number: object, root: Path) -> bool:
        """Take over a running jail that an earlier gateway process started.

        Returns False if its number cannot be used.
        """
        if not isinstance(number, int) or not 2 <= number <= self._bridge.capacity + 1 or number in self._numbers:
            return False
        self._numbers.add(number)
        self._next_offset = max(self._next_offset, number - 1)
        self._machines[instance] = Machine(jail, self._bridge.epair(number), root, is_running=True)
        return True

    def pop(self, instance: str) -> Machine | None:
        """Remove a machine. Its number stays reserved until ``release_number``."""
        return self._machines.pop(instance, None)

    def release_number(self, machine: Machine) -> None:
        self._numbers.discard(machine.epair.number)

    def clear(self) -> None:
        self._machines.clear()
