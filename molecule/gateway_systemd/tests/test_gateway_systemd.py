"""Sends one command to the machine, because every command through Ansible takes seconds."""

import json
import re

testinfra_hosts = ["debian"]

# The unit's score from systemd-analyze; lower is better.
MOST_EXPOSURE = 6.2

QUESTIONS = {
    "active": "systemctl is-active sandbox-gateway",
    "enabled": "systemctl is-enabled sandbox-gateway",
    "unit": "systemctl show --property=NRestarts,NoNewPrivileges,LockPersonality,KillMode,Delegate sandbox-gateway",
    "exposure": "systemd-analyze security --no-pager sandbox-gateway | tail -n 1",
    "socket": "stat --format='%F %a %G' /run/sandbox-gateway/gateway.sock",
    "keys": "stat --format=%a /etc/sandbox-gateway/keys",
    "sandboxes": "/usr/local/bin/sandboxctl --json list",
    "processes": "ps --no-headers -p 1 -o comm",
}


def test_the_unit_is_hardened_and_its_socket_answers(host):
    script = "; ".join(f"printf '\\036{name}\\037'; {command}" for name, command in QUESTIONS.items())
    said = dict(part.split("\x1f") for part in host.run(script).stdout.split("\x1e")[1:])
    assert (said["processes"].strip(), said["active"].strip(), said["enabled"].strip()) == (
        "systemd",
        "active",
        "enabled",
    )
    unit = dict(line.split("=", 1) for line in said["unit"].splitlines())
    assert unit["NRestarts"] == "0"
    assert (unit["NoNewPrivileges"], unit["LockPersonality"]) == ("yes", "yes")
    assert (unit["KillMode"], unit["Delegate"]) == ("process", "yes"), "sandboxes outlive it"
    assert float(re.search(r"([\d.]+) [A-Z]+", said["exposure"])[1]) <= MOST_EXPOSURE, said["exposure"]
    assert said["socket"].split() == ["socket", "660", "sandbox"]
    assert said["keys"].strip() == "600"
    assert json.loads(said["sandboxes"]) == []
