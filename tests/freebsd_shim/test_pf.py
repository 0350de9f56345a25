"""Test pfctl: which rules it accepts, and how it prints them."""

from __future__ import annotations

import pytest

from tests.freebsd_shim.harness import Shim

NOT_LOADED_ERROR = "pfctl: Syntax error in config file: pf rules not loaded"


def test_pfctl_prints_rules_like_freebsd(shim: Shim) -> None:
    rules = """\
# a sandbox
nat on em0 inet from 10.0.0.5 to any -> (em0)
rdr pass on em0 inet proto tcp from any to 192.0.2.9 port 8080 -> 10.0.0.5 port 80
block drop quick from 10.0.0.5 to { 10.0.0.0/8, 192.168.1.7/16 }
block in proto { tcp, udp } from 10.0.0.5 to any port 53
pass in quick on ! em0 inet proto tcp from any to 10.0.0.5 port 8000:8010
pass in quick inet from 10.0.0.5 to any keep state (max-src-states 9 source-track)
pass in quick inet from 10.0.0.6 to any keep state (source-track rule)
pass out no state
pass
"""
    shim.check_ok("pfctl", "-a", "sbx/1", "-f", "-", input=rules)
    assert shim.check_ok("pfctl", "-a", "sbx/1", "-s", "nat") == (
        "nat on em0 inet from 10.0.0.5 to any -> (em0) round-robin\n"
        "rdr pass on em0 inet proto tcp from any to 192.0.2.9 port = http-alt -> 10.0.0.5 port 80\n"
    )
    assert shim.check_ok("pfctl", "-a", "sbx/1", "-P", "-s", "rules") == (
        "block drop quick inet from 10.0.0.5 to 10.0.0.0/8\n"
        "block drop quick inet from 10.0.0.5 to 192.168.0.0/16\n"
        "block drop in inet proto tcp from 10.0.0.5 to any port = 53\n"
        "block drop in inet proto udp from 10.0.0.5 to any port = 53\n"
        "pass in quick on ! em0 inet proto tcp from any to 10.0.0.5 port 8000:8010 flags S/SA keep state\n"
        "pass in quick inet from 10.0.0.5 to any flags S/SA keep state (source-track global, max-src-states 9)\n"
        "pass in quick inet from 10.0.0.6 to any flags S/SA keep state (source-track rule)\n"
        "pass out all no state\n"
        "pass all flags S/SA keep state\n"
    )
    assert shim.check_ok("pfctl", "-a", "sbx", "-s", "Anchors") == "  sbx/1\n"
    shim("pfctl", "-q", "-a", "sbx/1", "-F", "all")
    assert shim.check_ok("pfctl", "-s", "Anchors") == ""
    shim.expect_failure(1, "pfctl: DIOCGETRULES: Invalid argument", "pfctl", "-a", "sbx/1", "-s", "rules")


def test_self_is_accepted_as_an_address(shim: Shim) -> None:
    shim.check_ok(
        "pfctl", "-a", "sbx/1", "-f", "-", input="block return in quick on em0 inet from 10.0.0.5 to (self)\n"
    )
    assert shim.check_ok("pfctl", "-a", "sbx/1", "-s", "rules") == (
        "block return in quick on em0 inet from 10.0.0.5 to (self)\n"
    )
    assert shim("pfctl", "-a", "sbx/1", "-f", "-", input="pass from any to (em0)\n").returncode == 70


def test_states_are_killed_by_source_and_target(shim: Shim) -> None:
    assert shim("pfctl", "-k", "10.0.0.5").stderr == "killed 0 states from 1 sources and 0 destinations\n"
    result = shim("pfctl", "-k", "0.0.0.0/0", "-k", "10.0.0.5")
    assert result.stderr == "killed 0 states from 1 sources and 1 destinations\n"
    shim.check_ok("pfctl", "-q", "-k", "10.0.0.5")
    assert shim("pfctl", "-k", "1.1.1.1", "-k", "2.2.2.2", "-k", "3.3.3.3").returncode == 1
    assert shim("pfctl", "-k", "label", "-k", "x").returncode == 70


@pytest.mark.parametrize(
    "rule",
    [
        "block drop quick in from any to any",  # direction before quick
        "pass from 10.0.0.1",  # valid, although "to" is missing; see below
        "blok drop",
        "pass in inet on em0 from any to any",
        "nat on em0 from any to any",
        "rdr on em0 inet proto tcp from any to any port 80 ->",
        "pass from 10.0.0.0/33 to any",
        "pass proto tcp from any to any port 70000",
        "pass from any to any port 80",  # a port without a protocol
        "pass inet from ::1 to any",
        'anchor "sbx',
        "pass from { 10.0.0.1, 10.0.0.2 to any",
        "pass $nope",
        "pass keep state ()",
        "pass keep state (source-track global,)",
        "pass keep state (source-track everywhere)",
        "pass keep state (max-src-states)",
        "pass keep state (max-src-states 5",
        "pass keep state (max-src-states many)",
        "pass keep state (max-src-states 5, max-src-states 6)",
        "pass keep state (max-src-states 0)",
        "pass keep state (max-src-states 4294967296)",
        "pass keep state (source-track, source-track rule)",
        "pass keep state (max_src_states 5)",
        "pass (max-src-states 5)",
        "pass no state (max-src-states 5)",
        "pass keep state (max-src-states 5) no state",
    ],
)
def test_invalid_pf_rules_are_refused(shim: Shim, rule: str) -> None:
    result = shim("pfctl", "-a", "sbx/1", "-f", "-", input=rule + "\n")
    if rule == "pass from 10.0.0.1":
        assert result.returncode == 0
        return
    assert (
        result.returncode == 1
        and result.stderr.startswith("stdin:1: ")
        and result.stderr.endswith(NOT_LOADED_ERROR + "\n")
    )
    assert shim("pfctl", "-a", "sbx/1", "-nf", "-", input=rule + "\n").stderr.startswith("stdin:1: ")


def test_rules_in_the_wrong_order_are_refused(shim: Shim) -> None:
    message = "Rules must be in order: options, ethernet, normalization, queueing, translation, filtering"
    text = "pass\nnat on em0 inet from any to any -> (em0)\n"
    shim.expect_failure(1, f"stdin:2: {message}\n{NOT_LOADED_ERROR}", "pfctl", "-a", "sbx/1", "-f", "-", input=text)
    shim.expect_failure(1, f"stdin:2: {message}", "pfctl", "-n", "-a", "sbx/1", "-f", "-", input=text)


STATE_RULES = (
    "pass keep state (max 5)",
    "pass keep state (tcp.closed 5)",
    "pass in quick inet all keep state (source-track rule, max-src-states 5)",
    "pass in inet all keep state (max-src-states 5)",
)


def test_an_unsupported_rule_is_not_a_syntax_error(shim: Shim) -> None:
    rules = ("table <bad> { 10.0.0.1 }", "pass log all", "match in all", "pass route-to (em0 10.0.0.1) all")
    for rule in (*rules, *STATE_RULES):
        assert shim("pfctl", "-a", "sbx/1", "-f", "-", input=rule + "\n").returncode == 70


def test_an_invalid_file_changes_nothing(shim: Shim) -> None:
    shim.check_ok("pfctl", "-a", "sbx/1", "-f", "-", input="block drop quick from 10.0.0.5 to any\n")
    shim("pfctl", "-a", "sbx/1", "-f", "-", input="pass\nnonsense\n")
    assert shim.check_ok("pfctl", "-a", "sbx/1", "-s", "rules") == "block drop quick inet from 10.0.0.5 to any\n"


def test_pf_can_be_enabled_and_disabled(shim: Shim) -> None:
    shim.expect_failure(1, "pfctl: pf already enabled", "pfctl", "-e")
    assert shim("pfctl", "-d").stderr == "pf disabled\n"
    shim.expect_failure(1, "pfctl: pf not enabled", "pfctl", "-d")
    shim.check_ok("freebsd-shim", "set", "pf.loaded", "0")
    shim.expect_failure(1, "pfctl: /dev/pf: No such file or directory", "pfctl", "-s", "rules")
    shim.check_ok("freebsd-shim", "set", "pf.loaded", "1")
    shim.expect_failure(
        1,
        "pfctl: /nowhere: No such file or directory\n"
        f"pfctl: cannot open the main config file!: No such file or directory\n{NOT_LOADED_ERROR}",
        *("pfctl", "-f", "/nowhere"),
    )
