"""The interface flag staticarp (IFF_STATICARP): the host answers ARP requests, but neither sends them nor learns.

See in_arpinput() and arpresolve_full() in sys/netinet/if_ether.c. An nftables table drops the replies to the host and
the host's own requests. It removes the sender from requests to the host, because Linux would learn it when it answers.
"""

from __future__ import annotations

from shim import base, pf_nft


def load_names() -> list[str]:
    """Return the names of the interfaces with the flag."""
    return list(base.load("staticarp", {"names": []})["names"])


def set_enabled(name: str, should_enable: bool) -> None:
    """Set or clear the flag of an interface. The caller holds the lock."""
    names = load_names()
    if (name in names) == should_enable:
        return
    names = [*names, name] if should_enable else [each for each in names if each != name]
    pf_nft.run_nft(format_table(names))
    base.save("staticarp", {"names": names})


def format_table(names: list[str]) -> str:
    table = pf_nft.get_table_name()
    header = f"table arp {table}\ndelete table arp {table}\n"
    if not names:
        return header
    interfaces = "{ " + ", ".join(f'"{name}"' for name in names) + " }"
    return (
        f"{header}table arp {table} {{\n"
        "  chain in {\n    type filter hook input priority 0\n"
        f"    iifname {interfaces} arp operation request arp saddr ip set 0.0.0.0\n"
        f"    iifname {interfaces} arp operation != request drop\n  }}\n"
        "  chain out {\n    type filter hook output priority 0\n"
        f"    oifname {interfaces} arp operation request drop\n  }}\n}}\n"
    )


def remove_table() -> None:
    pf_nft.run_nft(format_table([]))
