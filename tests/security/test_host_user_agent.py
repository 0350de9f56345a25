"""An ordinary user of a `kvm_xfs` host connects to the agent of a sandbox from the host's address.

An agent accepts an identity from that address without a token.
"""

from __future__ import annotations

import pytest

from sandbox_gateway.hosts.connect import AGENT_PORT, CODE_PORT, connect
from tests.kvm_xfs.slot_networks import NOBODY_UID, OPEN_POLICY, can_connect_as, world

pytestmark = pytest.mark.usefixtures("requires_root")


async def test_a_host_user_cannot_reach_agents() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        for port in (8000, AGENT_PORT, CODE_PORT):
            w.close_at_end(guest.listen(port))
        assert can_connect_as(NOBODY_UID, slot.host_address, 8000)
        assert not can_connect_as(NOBODY_UID, slot.host_address, AGENT_PORT)
        assert not can_connect_as(NOBODY_UID, slot.host_address, CODE_PORT)
        for port in (AGENT_PORT, CODE_PORT):
            assert not can_connect_as(0, slot.host_address, port), "root can connect without the mark"
            w.close_at_end(await connect(slot.host_address, port))
