"""Test rctl and sysctl: rules, messages, and the enforcement of limits."""

from __future__ import annotations

import os
import time

import pytest

from tests.freebsd_shim.harness import Shim

DISABLED_ERROR = "rctl: RACCT/RCTL present, but disabled; enable using kern.racct.enable=1 tunable"
FORK_PROGRAM = (
    "import subprocess, sys\n"
    "got = []\n"
    "try:\n"
    "    for _ in range(20): got.append(subprocess.Popen(['sleep', '100']))\n"
    "except OSError as error: print(error.errno)\n"
    "print(len(got))\n"
    "for each in got: each.kill()\n"
)

pytestmark = pytest.mark.skipif(not os.path.isdir("/sys/fs/cgroup/pids"), reason="needs cgroups version 1")


def test_rules_are_added_listed_and_removed(shim: Shim) -> None:
    shim.create_jail()
    shim.check_ok("rctl", "-a", "jail:sx1:maxproc:deny=100", "jail:sx1:vmemoryuse:deny=1g", "jail:sx1:pcpu:deny=50")
    shim.check_ok("rctl", "-a", "jail:other:maxproc:deny=5")
    assert shim.check_ok("rctl", "jail:sx1") == (
        "jail:sx1:maxproc:deny=100\njail:sx1:vmemoryuse:deny=1073741824\njail:sx1:pcpu:deny=50\n"
    )
    assert "jail:sx1:vmemoryuse:deny=1.0G\n" in shim.check_ok("rctl", "-h", "jail:sx1")
    shim.check_ok("rctl", "-a", "jail:sx1:maxproc:deny=7")  # replaces a rule that differs only in the amount
    assert shim.check_ok("rctl", "jail:sx1:maxproc") == "jail:sx1:maxproc:deny=7\n"
    shim.check_ok("jail", "-R", "sx1")
    assert shim.check_ok("rctl").count("jail:sx1:") == 3  # rules outlive the jail
    shim.check_ok("rctl", "-r", "jail:sx1")
    assert shim.check_ok("rctl") == "jail:other:maxproc:deny=5\n"
    shim.expect_failure(1, "rctl: failed to remove rule 'jail:sx1': No such process", "rctl", "-r", "jail:sx1")


def test_rctl_reports_errors_like_freebsd(shim: Shim) -> None:
    error_format = "rctl: failed to add rule '{}': {}"
    for rule, message in (
        ("jail:a:nonsense:deny=1", "Invalid argument"),
        ("jail:a:maxproc:refuse=1", "Invalid argument"),
        ("jail:a:maxproc:deny", "Invalid argument"),
        ("jail:a:cputime:deny=1", "Operation not supported"),
    ):
        shim.expect_failure(1, error_format.format(rule, message), "rctl", "-a", rule)
    shim.expect_failure(1, "rctl: malformed rule 'jail': missing subject", "rctl", "-a", "jail")
    rule = "jail:a:maxproc:deny=many"
    shim.expect_failure(1, f"rctl: malformed rule '{rule}': invalid numeric value 'many'", "rctl", "-a", rule)
    assert shim("rctl", "-a", "jail:a:x:deny=1", "jail:a:y:deny=1").returncode == 2  # one for each
    shim.expect_failure(1, "rctl: at most one of -a, -l, -r, or -u may be specified", "rctl", "-a", "-r", "jail:a")


def test_disabled_rctl_is_reported(shim: Shim) -> None:
    shim.check_ok("freebsd-shim", "set", "kern.racct.enable", "0")
    shim.expect_failure(1, DISABLED_ERROR, "rctl", "-a", "jail:sx1:maxproc:deny=100")
    shim.expect_failure(1, DISABLED_ERROR, "rctl")
    assert shim.check_ok("sysctl", "-n", "kern.racct.enable") == "0\n"
    shim.expect_failure(
        1,
        "sysctl: oid 'kern.racct.enable' is a read only tunable\nsysctl: Tunable values are set in /boot/loader.conf",
        *("sysctl", "kern.racct.enable=1"),
    )


def test_maxproc_is_enforced_until_the_rule_is_removed(shim: Shim) -> None:
    shim.check_ok("rctl", "-a", "jail:sx1:maxproc:deny=6")  # before the jail exists
    shim.create_jail()
    assert shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", FORK_PROGRAM).split() == [
        "11",
        "5",
    ]  # EAGAIN at the 7th process
    shim.check_ok("rctl", "-r", "jail:sx1")
    assert shim.check_ok("jexec", "sx1", "/usr/bin/python3", "-c", FORK_PROGRAM).split() == ["20"]


def test_rctl_measures_usage(shim: Shim) -> None:
    shim.create_jail()
    process = shim.start("jexec", "sx1", "sleep", "1000")
    while shim("pgrep", "-j", "sx1").returncode:
        time.sleep(0.02)
    usage = dict(line.split("=") for line in shim.check_ok("rctl", "-u", "jail:sx1").splitlines())
    assert len(usage) == 25 and usage["maxproc"] == "1" and int(usage["vmemoryuse"]) > int(usage["memoryuse"]) > 0
    shim.check_ok("pkill", "-KILL", "-j", "sx1")
    process.communicate()


def test_sysctl_reads_and_writes_values(shim: Shim) -> None:
    assert shim.check_ok("sysctl", "kern.ostype") == "kern.ostype: FreeBSD\n"
    assert shim.check_ok("sysctl", "-n", "kern.osreldate", "kern.osrelease") == "1403000\n14.3-RELEASE\n"
    assert shim.check_ok("sysctl", "net.link.bridge.pfil_member=0") == "net.link.bridge.pfil_member: 1 -> 0\n"
    assert shim.check_ok("sysctl", "-n", "net.link.bridge.pfil_member") == "0\n"
    shim.check_ok("sysctl", "net.inet.ip.forwarding=0")
    assert shim.check_ok("sysctl", "-n", "net.inet.ip.forwarding=1") == "0 -> 1\n"
    shim.expect_failure(1, "sysctl: unknown oid 'no.such'", "sysctl", "-n", "no.such")
    linux_feature = "kern.features.linux64"
    assert shim.check_ok("sysctl", "-ie", linux_feature) == ""
    shim.expect_failure(1, f"sysctl: unknown oid '{linux_feature}'", "sysctl", "-n", linux_feature)
    shim.check_ok("freebsd-shim", "set", "linux", "1")
    assert shim.check_ok("sysctl", "-ie", linux_feature) == f"{linux_feature}=1\n"
    shim.expect_failure(1, f"sysctl: oid '{linux_feature}' is read only", "sysctl", f"{linux_feature}=0")
    shim.expect_failure(1, "sysctl: oid 'kern.ostype' is read only", "sysctl", "kern.ostype=Linux")
