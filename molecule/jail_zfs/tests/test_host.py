"""Check that the host runs the gateway, and that each sandbox has a jail and a clone."""

import json
import os
import re
from pathlib import Path

testinfra_hosts = ["localhost"]

STATE = os.environ["GROVE_MOLECULE_STATE"]
SHIM = Path(__file__).parents[3] / "tests" / "freebsd_shim" / "bin"


def test_the_host_has_a_jail_and_a_clone_for_each_sandbox(host):
    assert host.socket(f"unix://{STATE}/gateway.sock").is_listening
    sandboxes = json.loads(host.check_output(f"{STATE}/bin/sandboxctl --url unix://{STATE}/gateway.sock --json list"))
    assert {each["name"]: each["state"] for each in sandboxes} == dict.fromkeys(
        ("source", "copy-1", "copy-2"), "running"
    )
    config = host.file(f"{STATE}/etc/config.toml").content_string
    dataset, prefix = (re.search(rf'^{key} = "(.*)"$', config, re.M)[1] for key in ("dataset", "prefix"))
    freebsd = f"env PATH={SHIM}:$PATH:/usr/sbin:/sbin FREEBSD_SHIM_STATE={STATE}/freebsd"
    assert len(host.check_output(f"{freebsd} jls name").split()) == 3
    assert host.check_output(f"{freebsd} ifconfig {prefix}br")
    mounts = host.check_output("findmnt --list --noheadings --output SOURCE --types fuse.zfs").split()
    assert len([source for source in mounts if source.startswith(f"{dataset}/sandboxes/")]) == 3
