"""Test a template that is built from an image in a registry: one machine boots, and its forks run the image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gateway import Gateway, build_template
from tests.support.images import (
    make_entry,
    make_layer,
    make_small_debian_layer,
    push_image,
    running_registry,
    write_layout,
)
from tests.support.waiting import wait_until

SCRIPT = b"""#!/bin/sh
{ id; pwd; echo "$GREETING" "$1"; } > /tmp/started
exec sleep 100000
"""


@pytest.fixture(scope="module")
def layout(requires_root: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("image")
    system = make_small_debian_layer(directory)
    app = make_layer(
        make_entry("srv/app/run", SCRIPT, mode=0o755),
        make_entry("srv/app/owned", b"", uid=1000, gid=1001, mode=0o600),
        make_entry("srv/app/setuid", b"", mode=0o4755),
    )
    settings = {
        "Entrypoint": ["run", "with an argument"],
        "Env": ["PATH=/srv/app:/usr/bin", "GREETING=hello there"],
        "User": "1234:games",
        "WorkingDir": "/srv/made",
    }
    return write_layout(directory / "layout", [system, app], settings)


def test_a_template_from_a_registry_runs_its_entry_point(
    gateway: Callable[..., Gateway], layout: Path, tmp_path: Path
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        image = f"docker://{registry}/team/app:1.0"
        push_image(layout, f"{registry}/team/app:1.0")
        instance = gateway({"kvm_xfs": {"insecure_registries": [registry]}}, seed_template=False)
        recipe = {
            "from": "image",
            "image": image,
            "readyProbe": "test -e /tmp/started",
            "diskSizeMB": 1024,
        }
        template = build_template(instance, "app", **recipe)
        assert template["recipe"]["from"] == "image" and template["recipe"]["image"] == image
        sandbox = instance.call("POST", "/sandboxes", {"templateID": "app"})["sandboxID"]
        started = instance.sh(sandbox, "cat /tmp/started").splitlines()
        assert started == ["uid=1234 gid=60(games) groups=60(games)", "/srv/made", "hello there with an argument"]
        owners = instance.sh(sandbox, "cd /srv/app; stat -c '%u %g %a' owned setuid")
        assert owners == "1000 1001 600\n0 0 4755\n"
        assert instance.sh(sandbox, "echo $PATH; id -u; cat /proc/1/comm") == "/srv/app:/usr/bin\n0\ninit\n"
        assert "default via" in instance.sh(sandbox, "/opt/sandbox/bin/ip route")

        build = {"name": "app", "cpuCount": 1, "memoryMB": 256, **recipe}
        assert instance.call("POST", "/templates", build)["buildStatus"] == "ready"
        assert instance.call("POST", "/templates/app", status=200)["buildStatus"] == "ready"
        push_image(write_layout(tmp_path / "new", [make_layer(make_entry("etc/motd"))]), f"{registry}/team/app:1.0")
        rebuild = instance.call("POST", "/templates/app", status=202)
        status = f"/templates/{rebuild['templateID']}/builds/{rebuild['buildID']}/status"
        wait_until(lambda: instance.call("GET", status)["status"] == "error")
        assert "the image has no /bin/sh" in instance.call("GET", status)["errorMessage"]
        assert instance.call("GET", "/templates/app")["templateID"] == template["templateID"]
        assert not list(instance.state_root.rglob(".partial*"))
