"""Manage network slots: a pool of network namespaces, each with the tap and rules of one sandbox.

    guest ── tap0 ─[ namespace <prefix>-n ]─ <prefix>-nv ══ <prefix>-nh ─[ host ]─ elsewhere
       169.254.0.21  169.254.0.22        one /30 of `network.subnet`

To their guests, all slots look the same, including the MAC addresses: a guest's ARP cache and connections are part of
its memory, which moves from slot to slot. On the host, each slot has a unique address, all of whose ports are
forwarded to the guest. The guest's range is link-local. Such addresses do not exist beyond the next hop, so the range
does not hide any destination (10/8, 172.16/12, 192.168/16 and 100.64/10 are all in use somewhere). It is only a /30, so
guests send packets for 169.254.169.254 to their gateway, where the rules apply.

There are rules in two places, neither of which the guest can reach: in the slot (for the guest's address and policy)
and on the host (to prevent access from a slot to the host or to other slots). The last step of creating a slot brings
up the host's end of the veth, which commits the slot. A slot whose host end is down at start-up is incomplete.

Volume servers have a separate namespace, with one veth to the host and one address, the last of `network.subnet`. A
guest sees them as ports of its gateway, so its mounts are the same in every slot. The host checks each packet: a slot
can reach a port if the pair of address and port is in a set of the host's table. Except for slots, only the gateway can
reach that namespace, and only replies leave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import deque
from collections.abc import Mapping

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Busy, Invalid
from sandbox_gateway.hosts.kvm_xfs.network import links
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    RUN_NETNS,
    Slot,
    count_slots,
    get_host_table,
    get_volume_address,
)
from sandbox_gateway.hosts.kvm_xfs.network.name_policy import NamePolicy
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import run_in_thread, set_sysctl, share_run_netns
from sandbox_gateway.hosts.kvm_xfs.network.resolver import Resolver, open_socket
from sandbox_gateway.hosts.kvm_xfs.network.rules import (
    apply_in_slot,
    apply_on_host,
    build_host_rules,
    build_name_address_rules,
    build_policy_rules,
    build_slot_rules,
    build_table_removal,
)
from sandbox_gateway.hosts.kvm_xfs.network.upstream import Upstream
from sandbox_gateway.hosts.network_policy import find_name_servers
from sandbox_gateway.log import Logger
from sandbox_gateway.records import NetworkPolicy
from sandbox_gateway.tasks import BackgroundTasks

_REFILL_RETRY_SECONDS = 5.0

log = Logger("network")


class SlotPool:
    """Manages the slots of one gateway. User ``uid_base`` + n owns the tap of slot n. If ``uid_base`` is 0, root does.

    Async methods may raise BackendFailed if the kernel or nft refuses an operation.
    """

    def __init__(self, network: Network, *, uid_base: int = 0) -> None:
        self._network = network
        self._subnet = ipaddress.IPv4Network(network.subnet)
        self._capacity = count_slots(network)
        self._uid_base = uid_base
        self._dns = find_name_servers(network)
        self._upstream = Upstream(self._dns)
        self._resolvers: dict[int, Resolver] = {}
        self._ready_slots: deque[Slot] = deque()
        self._slots: dict[int, Slot] = {}
        self._busy_numbers: set[int] = set()
        self._next_number = 0
        self._refill_requested = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._background = BackgroundTasks(log, failure_event="a network slot could not be removed")
        self._is_closed = True

    # -- start and stop -------------------------------------------------------------------------------------------

    async def open(self, in_use: set[int]) -> None:
        """Set up the host, adopt the complete slots whose numbers are in ``in_use``, and start refilling the pool.

        Removes all other slots, even complete ones, because they may have been used before.
        """
        self._is_closed = False
        await run_in_thread(self._prepare_host)
        await apply_on_host(build_host_rules(self._network))
        await run_in_thread(links.create_volume_namespace, self._network)
        existing_numbers, complete_numbers = await run_in_thread(links.find_slots, self._network.prefix)
        for number in sorted(existing_numbers):
            slot = self._create_slot_record(number)
            if number in in_use and number in complete_numbers and number < self._capacity:
                self._slots[number] = slot
            else:
                await run_in_thread(links.remove_slot, slot)
        self._next_number = max(in_use, default=-1) + 1
        self._refiller = asyncio.create_task(self._refill(), name="network-slots")
        self._refill_requested.set()

    async def close(self) -> None:
        """Stop creating slots, and remove unused slots. Slots in use and their rules remain."""
        if self._is_closed:
            return  # The pool is not open: slots on the host belong to another gateway.
        self._is_closed = True
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.wait([self._refiller])
            self._refiller = None
        await self._background.wait()
        for number in [*self._resolvers]:
            self._close_resolver(number)
        while self._ready_slots:
            await self._remove(self._ready_slots.pop())
        if not self._slots:
            await self._clean_up_host()

    async def destroy(self) -> None:
        """Remove all slots and rules with this prefix from the host, even slots in use."""
        await self.close()
        existing_numbers, _ = await run_in_thread(links.find_slots, self._network.prefix)
        for number in existing_numbers:
            await run_in_thread(links.remove_slot, self._create_slot_record(number))
        self._slots.clear()
        await self._clean_up_host()

    # -- slots ----------------------------------------------------------------------------------------------------

    async def take(self, policy: NetworkPolicy) -> Slot:
        """Return an unused slot with ``policy`` applied, from the pool if possible.

        Raises Busy if all slots are in use, and Invalid for an invalid policy.
        """
        self.check(policy)
        slot = self._ready_slots.popleft() if self._ready_slots else await self._create()
        self._refill_requested.set()
        try:
            if policy.egress != NetworkPolicy().egress:
                await self.apply(slot, policy)
        except BaseException:
            self._retire(slot)
            raise
        return slot

    async def release(self, slot: Slot) -> None:
        """Remove the slot of a machine that has stopped, with its rules and tracked connections.

        Returns immediately. The removal runs in the background, and `close` waits for it.
        """
        if self._slots.get(slot.number) == slot:
            self._retire(slot)

    async def adopt(self, number: int, policy: NetworkPolicy) -> Slot:
        """Return the slot of a sandbox that an earlier gateway started, and answer the sandbox's DNS queries again.

        The slot keeps its rules. Raises BackendFailed if the slot is missing.
        """
        slot = self._slots.get(number)
        if slot is None:
            raise BackendFailed(
                f"the network slot {self._network.prefix}-{number} of a running sandbox no longer exists: "
                "pause and resume the sandbox"
            )
        if names := NamePolicy(policy, self._subnet):
            await self._open_resolver(slot, names)
        return slot

    def check(self, policy: NetworkPolicy) -> None:
        """Raise Invalid if ``policy`` cannot be applied."""
        if NamePolicy(policy, self._subnet) and not self._dns:
            raise Invalid(
                "allowOut: the host has no name server that can look up domain names: set [network] dns in the "
                "gateway's configuration"
            )

    async def apply(self, slot: Slot, policy: NetworkPolicy) -> None:
        """Apply ``policy`` to all subsequent packets of a slot, including those of open connections."""
        self.check(policy)
        rules = build_policy_rules(policy, self._dns, self._subnet)
        names = NamePolicy(policy, self._subnet)
        if names and slot.number not in self._resolvers:
            await self._open_resolver(slot, names)
        if (resolver := self._resolvers.get(slot.number)) is None:
            await apply_in_slot(slot, rules)
            return
        async with resolver.replacing_policy(names):
            await apply_in_slot(slot, rules)
        if not names:
            self._close_resolver(slot.number)

    async def _open_resolver(self, slot: Slot, names: NamePolicy) -> None:
        async def open_addresses(seconds: Mapping[str, int]) -> None:
            await apply_in_slot(slot, build_name_address_rules(seconds))

        endpoint = await run_in_thread(open_socket, slot)
        if self._slots.get(slot.number) is not slot:  # Its machine has stopped. Another slot may soon have this number.
            endpoint.close()
            raise BackendFailed(f"the network slot {slot.name} was removed because its machine has stopped")
        self._resolvers[slot.number] = Resolver(endpoint, names, self._upstream, open_addresses)

    def _close_resolver(self, number: int) -> None:
        if resolver := self._resolvers.pop(number, None):
            resolver.close()

    # -- creating and removing ----------------------------------------------------------------------------------------

    async def _create(self) -> Slot:
        """Create a slot. If the caller is cancelled, the slot is added to the pool."""
        slot = self._create_slot_record(self._find_next_free_number())
        self._busy_numbers.add(slot.number)
        task = asyncio.ensure_future(self._set_up(slot))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._background.start(self._add_to_pool(task))
            raise

    async def _add_to_pool(self, task: asyncio.Future[Slot]) -> None:
        with contextlib.suppress(Exception):
            slot = await task
            if self._is_closed:
                await self._remove(slot)
            else:
                self._ready_slots.append(slot)

    async def _set_up(self, slot: Slot) -> Slot:
        """Set up a slot. On failure, remove it."""
        try:
            await run_in_thread(links.create_slot, slot)
            await apply_in_slot(slot, build_slot_rules(slot, self._network, self._dns))
            await run_in_thread(links.commit_slot, slot)
            self._slots[slot.number] = slot
        except BaseException:
            await run_in_thread(links.remove_slot, slot)
            raise
        finally:
            self._busy_numbers.discard(slot.number)
        return slot

    def _retire(self, slot: Slot) -> None:
        self._busy_numbers.add(slot.number)
        self._close_resolver(slot.number)
        del self._slots[slot.number]
        self._background.start(self._remove(slot))

    async def _remove(self, slot: Slot) -> None:
        """Remove a slot and free its number. If the slot cannot be removed, its number stays in use."""
        self._busy_numbers.add(slot.number)
        self._close_resolver(slot.number)
        self._slots.pop(slot.number, None)
        await run_in_thread(links.remove_slot, slot)
        self._busy_numbers.discard(slot.number)
        self._refill_requested.set()

    async def _refill(self) -> None:
        """Keep ``network.pool`` slots ready. Creates them one at a time, so that requests are not slowed down."""
        while True:
            await self._refill_requested.wait()
            self._refill_requested.clear()
            try:
                while len(self._ready_slots) < self._network.pool:
                    self._ready_slots.append(await self._create())
            except Busy:
                pass  # All numbers are in use. The next release wakes this task.
            except Exception as error:
                log.warning("a network slot could not be created", reason=str(error))
                await asyncio.sleep(_REFILL_RETRY_SECONDS)
                self._refill_requested.set()

    def _find_next_free_number(self) -> int:
        """Return the number that has been free the longest, so that the host has forgotten its connections."""
        for step in range(self._capacity):
            number = (self._next_number + step) % self._capacity
            if number not in self._slots and number not in self._busy_numbers:
                self._next_number = number + 1
                return number
        raise Busy(
            f"all {self._capacity} network slots of {self._network.subnet} are in use: remove sandboxes, or "
            "set a larger [network] subnet"
        )

    def _create_slot_record(self, number: int) -> Slot:
        name = f"{self._network.prefix}-{number}"
        base_address = self._subnet.network_address + 4 * number
        return Slot(
            number=number,
            name=name,
            path=RUN_NETNS / name,
            host_address=str(base_address + 2),
            veth_address=str(base_address + 1),
            veth=f"{name}h",
            uid=self._uid_base + number if self._uid_base else 0,
        )

    # -- the host ---------------------------------------------------------------------------------------------------

    def _prepare_host(self) -> None:
        share_run_netns()
        set_sysctl("net/ipv4/ip_forward", "1")
        # Clean up after an older release, whose volume servers did not have a separate namespace.
        links.remove_loopback_address(get_volume_address(self._network))

    async def _clean_up_host(self) -> None:
        await run_in_thread(links.remove_volume_namespace, self._network)
        await apply_on_host(build_table_removal(get_host_table(self._network)))
