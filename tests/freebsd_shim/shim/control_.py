"""The command ``freebsd-shim``, with which tests set knobs and remove everything that the shim has created."""

from __future__ import annotations

import os

from shim import base, prison

USAGE = """\
usage: freebsd-shim set knob value      (kern.racct.enable, kern.osreldate, linux, dying, busy, pf.loaded)
       freebsd-shim purge               remove all jails, mounts, interfaces, limits and rules of the shim"""


def main(argv: list[str]) -> int:
    if len(argv) == 3 and argv[0] == "set" and argv[1] in base.KNOBS:
        with base.locked():
            knobs = base.load("knobs", {})
            knobs[argv[1]] = argv[2]
            base.save("knobs", knobs)
        return 0
    if argv != ["purge"]:
        raise base.usage(USAGE)
    if os.path.isdir(base.get_state_dir()):
        purge()
    return 0


def purge() -> None:
    from shim import limits, mount_, net, pf_nft, static_arp

    with base.locked():
        for jail in prison.load_state()["jails"]:
            prison.tear_down(jail)
        mount_.purge()
        interface_names = set(base.load("interfaces", {"names": []})["names"])
        netlink = net.NetlinkSocket()
        for link in netlink.list_links():
            if link.driver and f"{link.driver}{link.unit}" in interface_names:
                try:
                    netlink.delete_link(link.index)
                except OSError:
                    continue  # it was removed together with its other end
        limits.purge()
        pf_nft.remove_ruleset()
        static_arp.remove_table()
        for name in os.listdir(base.get_state_dir()):
            if name.endswith(".json"):
                os.unlink(os.path.join(base.get_state_dir(), name))
