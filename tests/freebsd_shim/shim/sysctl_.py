"""sysctl(8) for the few names that the gateway and its roles use, with the messages of sbin/sysctl/sysctl.c."""

from __future__ import annotations

import os

from shim import base

USAGE = """\
usage: sysctl [-j jail] [-bdeFhilnNoqTtVWx] [ -B <bufsize> ] [-f filename] name[=value[,value]] ...
       sysctl [-j jail] [-bdeFhlnNoqTtVWx] [ -B <bufsize> ] -a"""

# Where the value of each variable is stored ("knob", "linux" if it is 1 with linux(4) and does not exist without it,
# "state:DEFAULT", "proc:FILE" on Linux, "=VALUE"), and how it may be accessed.
VARIABLES = {
    "kern.ostype": ("=FreeBSD", "ro"),
    "kern.osrelease": ("release", "ro"),
    "kern.osreldate": ("knob", "ro"),
    "kern.racct.enable": ("knob", "tunable"),
    "kern.features.linux64": ("linux", "ro"),  # FEATURE(linux64, …) in sys/amd64/linux/linux_sysvec.c
    "kern.maxfiles": ("state:126781", "rw"),
    "kern.logsigexit": ("state:1", "rw"),
    "kern.hostname": ("hostname", "ro"),
    "hw.ncpu": ("ncpu", "ro"),
    "hw.pagesize": ("pagesize", "ro"),
    "hw.physmem": ("physmem", "ro"),
    "vm.stats.vm.v_free_count": ("available", "ro"),
    "vm.stats.vm.v_inactive_count": ("=0", "ro"),
    "kstat.zfs.misc.arcstats.c_min": ("=0", "ro"),
    "kstat.zfs.misc.arcstats.size": ("=0", "ro"),
    "net.inet.ip.forwarding": ("proc:/proc/sys/net/ipv4/ip_forward", "rw"),
    "net.inet6.ip6.forwarding": ("proc:/proc/sys/net/ipv6/conf/all/forwarding", "rw"),
    "net.link.bridge.inherit_mac": ("state:0", "rw"),
    "net.link.bridge.pfil_bridge": ("state:1", "rw"),
    "net.link.bridge.pfil_local_phys": ("state:0", "rw"),
    "net.link.bridge.pfil_member": ("state:1", "rw"),
    "net.link.bridge.pfil_onlyip": ("state:1", "rw"),
    "security.jail.enforce_statfs": ("=2", "ro"),
    "security.jail.jail_max_af_ips": ("=255", "ro"),
    "security.jail.jailed": ("=0", "ro"),
    "security.jail.vnet": ("=0", "ro"),
    "vfs.usermount": ("=0", "ro"),
}


def is_known(name: str) -> bool:
    """Return whether the kernel defines a variable. Those of a module exist only while it is loaded."""
    return name in VARIABLES and (VARIABLES[name][0] != "linux" or base.read_knob("linux") == "1")


def read_value(name: str) -> str:
    storage = VARIABLES[name][0]
    if storage.startswith("="):
        return storage[1:]
    if storage == "linux":
        return "1"
    if storage == "knob":
        return base.read_knob(name)
    if storage.startswith("proc:"):
        with open(storage[5:]) as file:
            return file.read().strip()
    if storage.startswith("state:"):
        return str(base.load("sysctl", {}).get(name, storage[6:]))
    if storage == "release":
        osreldate = base.read_osreldate()
        return f"{osreldate // 100000}.{osreldate // 1000 % 100}-RELEASE"
    if storage == "hostname":
        return os.uname().nodename
    if storage == "ncpu":
        return str(os.cpu_count())
    if storage == "pagesize":
        return str(os.sysconf("SC_PAGE_SIZE"))
    if storage == "available":
        with open("/proc/meminfo") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
        return str(kilobytes * 1024 // os.sysconf("SC_PAGE_SIZE"))
    return str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def write_value(name: str, value: str) -> None:
    storage = VARIABLES[name][0]
    if storage.startswith("proc:"):
        with open(storage[5:], "w") as file:
            file.write(value)
        return
    with base.locked():
        values = base.load("sysctl", {})
        values[name] = value
        base.save("sysctl", values)
        if name.startswith("net.link.bridge.pfil_"):
            from shim import pf_nft

            pf_nft.apply_ruleset(pf_nft.load_state())  # The rules of bridge members depend on them.


def main(argv: list[str]) -> int:
    try:
        options, words = base.getopt(argv, "AaB:bdeFf:hij:lNnoqTtVWxX")
    except base.BadOption:
        raise base.usage(USAGE) from None
    option_letters = {letter for letter, _ in options}
    for letter in sorted(option_letters - set("einNq")):
        raise base.unsupported(f"-{letter}")
    if not words:
        raise base.usage(USAGE)
    error_count = 0
    for word in words:
        error_count += read_or_write(word, option_letters)
    return 1 if error_count else 0


def read_or_write(word: str, option_letters: set[str]) -> int:
    """Read or write one value, like parse() in sysctl.c. Returns 0, or 1 after an error."""
    name, equals, value = word.partition("=")
    if not is_known(name):
        if "i" in option_letters:
            return 0
        if "q" not in option_letters:
            base.warnx(f"unknown oid '{name}'")
        return 1
    access = VARIABLES[name][1]
    if equals and access == "tunable":
        base.warnx(f"oid '{name}' is a read only tunable")
        base.warnx("Tunable values are set in /boot/loader.conf")
        return 1
    if equals and access == "ro":
        base.warnx(f"oid '{name}' is read only")
        return 1
    if equals and not value.lstrip("-").isdigit():
        base.warnx(f"invalid integer '{value}'")
        return 1
    old_value = read_value(name)
    separator = "=" if "e" in option_letters else ": "
    prefix = "" if "n" in option_letters else name + separator
    if not equals:
        base.print_line(name if "N" in option_letters else prefix + old_value)
        return 0
    write_value(name, value)
    base.print_line(f"{prefix}{old_value} -> {read_value(name)}")
    return 0
