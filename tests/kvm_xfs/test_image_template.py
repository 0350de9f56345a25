"""Test a template that is built from an image in a registry: one machine boots, and its forks run the image."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gateway.hosts.kvm_xfs.template.debian import unpack_debian
from sandbox_gateway.recipes import Recipe
from tests.support import session
from tests.support.gateway import Gateway, build_template
from tests.support.images import entry, layer, layer_of_tree, push, running_registry, write_layout

LIBRARIES = "usr/lib/*-linux-gnu"
FILES = [
    *("./bin", "./lib", "./lib64", "./usr/lib64", "./etc/passwd", "./etc/group"),
    *(f"./usr/bin/{name}" for name in ("dash", "sh", "cat", "env", "id", "pwd", "sleep", "stat")),
    *(f"./{LIBRARIES}/{name}" for name in ("libc.so.6", "ld-linux-*", "libselinux.so.1", "libpcre2-8.so.0*")),
]
"""Files of a Debian tree that make a small image: without Python, systemd, ip, and bash."""

SCRIPT = b"""#!/bin/sh
{ id; pwd; echo "$GREETING" "$1"; } > /tmp/started
exec sleep 100000
"""


@pytest.fixture(scope="module")
def layout(need_root: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("image")
    system = _small_debian_layer(directory)
    app = layer(
        entry("srv/app/run", SCRIPT, mode=0o755),
        entry("srv/app/owned", b"", uid=1000, gid=1001, mode=0o600),
        entry("srv/app/setuid", b"", mode=0o4755),
    )
    settings = {
        "Entrypoint": ["run", "with an argument"],
        "Env": ["PATH=/srv/app:/usr/bin", "GREETING=hello there"],
        "User": "1234:games",
        "WorkingDir": "/srv/made",
    }
    return write_layout(directory / "layout", [system, app], settings)


def _small_debian_layer(directory: Path) -> bytes:
    import asyncio

    tree = directory / "tree"
    tree.mkdir()
    asyncio.run(unpack_debian(Recipe(), tree, directory, session.cache_dir(), lambda line: None))
    pattern = " ".join(FILES)
    names = subprocess.run(
        ["sh", "-c", f"ls -d {pattern}"], cwd=tree, check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    return layer_of_tree(tree, names)


def test_a_template_from_a_registry_runs_its_entry_point(
    gateway: Callable[..., Gateway], layout: Path, tmp_path: Path
) -> None:
    with running_registry(tmp_path / "registry") as registry:
        image = f"docker://{registry}/team/app:1.0"
        push(layout, f"{registry}/team/app:1.0")
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
        push(write_layout(tmp_path / "new", [layer(entry("etc/motd"))]), f"{registry}/team/app:1.0")
        assert instance.call("POST", "/templates", build)["buildStatus"] == "building"
