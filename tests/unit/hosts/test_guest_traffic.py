"""Test that the traffic of a guest is read from the counters of its tap."""

from __future__ import annotations

from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.qemu.machine import parse_traffic

_INTERFACES = """Inter-|   Receive                                   |  Transmit
 face |bytes  packets errs drop fifo frame compressed multicast|bytes   packets errs drop fifo colls carrier compressed
    lo:   111       1    0    0    0     0          0         0     111       1    0    0    0     0       0          0
sb-1-nv: 222       2    0    0    0     0          0         0      333       3    0    0    0     0       0          0
  tap0: 4400      44    0    0    0     0          0         0  5500000      55    0    0    0     0       0          0
"""


def test_the_guest_receives_what_its_tap_sends() -> None:
    assert parse_traffic(_INTERFACES) == (5500000, 4400)


def test_a_namespace_without_a_tap_has_no_traffic() -> None:
    assert parse_traffic(_INTERFACES.replace("tap0", "tap1")) == (None, None)
    assert parse_traffic("") == (None, None)


def test_the_kernel_still_writes_this_format() -> None:
    (heading,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "bytes" in line]
    assert [heading.split("|")[number].split()[0] for number in (1, 2)] == ["bytes", "bytes"]
    assert len(heading.split("|")[1].split()) == 8
