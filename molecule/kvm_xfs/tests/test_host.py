"""Check that the host has a file system with reflinks and runs the gateway."""

import json
import os

testinfra_hosts = ["localhost"]

STATE = os.environ["GROVE_MOLECULE_STATE"]


def test_the_host_has_reflinks_and_a_running_gateway(host):
    mount = host.mount_point(f"{STATE}/state")
    assert mount.exists and mount.filesystem == "xfs"
    assert "reflink=1" in host.check_output("xfs_info %s", mount.path)
    assert host.socket(f"unix://{STATE}/gateway.sock").is_listening
    sandboxes = json.loads(host.check_output(f"{STATE}/bin/sandboxctl --url unix://{STATE}/gateway.sock --json list"))
    assert {each["name"]: each["state"] for each in sandboxes} == dict.fromkeys(
        ("source", "copy-1", "copy-2"), "running"
    )
