"""Check the gateway with a single command, because every command through Ansible takes seconds."""

import json
import re

testinfra_hosts = ["debian"]

# The unit's score from systemd-analyze; lower is better.
MAX_EXPOSURE = 6.2

COMMANDS = {
    "active": "systemctl is-active sandbox-gateway",
    "enabled": "systemctl is-enabled sandbox-gateway",
    "unit": "systemctl show --property=NRestarts,NoNewPrivileges,LockPersonality,KillMode,Delegate sandbox-gateway",
    "exposure": "systemd-analyze security --no-pager sandbox-gateway | tail -n 1",
    "socket": "stat --format='%F %a %G' /run/sandbox-gateway/gateway.sock",
    "keys": "stat --format=%a /etc/sandbox-gateway/keys",
    "sandboxes": "/usr/local/bin/sandboxctl --json list",
    "processes": "ps --no-headers -p 1 -o comm",
}


def test_the_unit_is_hardened_and_the_gateway_responds(host):
    script = "; ".join(f"printf '\\036{name}\\037'; {command}" for name, command in COMMANDS.items())
    outputs = dict(part.split("\x1f") for part in host.run(script).stdout.split("\x1e")[1:])
    assert (outputs["processes"].strip(), outputs["active"].strip(), outputs["enabled"].strip()) == (
        "systemd",
        "active",
        "enabled",
    )
    unit = dict(line.split("=", 1) for line in outputs["unit"].splitlines())
    assert unit["NRestarts"] == "0"
    assert (unit["NoNewPrivileges"], unit["LockPersonality"]) == ("yes", "yes")
    assert (unit["KillMode"], unit["Delegate"]) == ("process", "yes"), (
        "sandboxes must keep running when the gateway stops"
    )
    assert float(re.search(r"([\d.]+) [A-Z]+", outputs["exposure"])[1]) <= MAX_EXPOSURE, outputs["exposure"]
    assert outputs["socket"].split() == ["socket", "660", "sandbox"]
    assert outputs["keys"].strip() == "600"
    assert json.loads(outputs["sandboxes"]) == []
