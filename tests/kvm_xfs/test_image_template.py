"""Test a template that is built from an image in a registry: one machine boots, and its forks run the image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _template
from ansible_collections.grove.sandbox.plugins.module_utils._run import run

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
{ id; pwd; echo "$GREETING" "$@"; } > /tmp/started
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


TOOL = """#!/bin/sh
{ id -u; pwd; echo "$PATH|$STYLE|$WORD|$1"; cat /etc/resolv.conf; } > /tmp/$1
"""
DOCKERFILE = r"""
ARG VERSION=2.0
FROM {registry}/team/app:$VERSION
ARG TARGET=/opt/app WORD=built
ENV PATH=$TARGET/bin:$PATH STYLE='$plain'
WORKDIR $TARGET
COPY --chown=1234:60 --chmod=0750 bin bin
COPY no*.txt notes/
COPY . ./all
USER 1234:games
RUN tool \
    shell && cd / && echo lost > /tmp/$WORD
ENV GREETING="bye, $GREETING"
WORKDIR sub
RUN ["tool", "exec"]
RUN <<EOF
umask 077
: > /tmp/document
EOF
CMD ["a changed argument"]
"""


def test_a_template_from_a_dockerfile(gateway: Callable[..., Gateway], layout: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "bin").mkdir(parents=True)
    (project / "bin" / "tool").write_text(TOOL)
    for name in ("note.txt", "notes.txt", "ignored.log"):
        (project / name).write_text(name)
    (project / ".dockerignore").write_text("*.log\n")
    with running_registry(tmp_path / "registry") as registry:
        push_image(layout, f"{registry}/team/app:2.0")
        instance = gateway({"kvm_xfs": {"insecure_registries": [registry]}}, seed_template=False)
        (project / "Dockerfile").write_text(DOCKERFILE.replace("{registry}", registry))
        params = {
            **{name: option.get("default") for name, option in _template.ARGUMENTS.items()},
            "gateway_url": instance.url,
            "name": ["app"],
            "dockerfile": str(project / "Dockerfile"),
            "ready_probe": "test -e /tmp/started",
            "disk_mb": 1024,
        }
        predicted = run(_template, {**params, "check_run": "a run with a Dockerfile"}, check_mode=True)
        result = run(_template, params, check_mode=False)
        assert not result.get("failed"), result["msg"]
        assert predicted["changed"] and predicted["diff"] == result["diff"]
        assert not run(_template, params, check_mode=False)["changed"]
        sandbox = instance.call("POST", "/sandboxes", {"templateID": "app"})["sandboxID"]
        outputs = [
            instance.sh(sandbox, f"cat /tmp/{name}").splitlines() for name in ("shell", "exec", "started", "built")
        ]
        path = "/opt/app/bin:/srv/app:/usr/bin"
        assert outputs == [
            ["1234", "/opt/app", f"{path}|$plain|built|shell"],
            ["1234", "/opt/app/sub", f"{path}|$plain|built|exec"],
            [
                "uid=1234 gid=60(games) groups=60(games)",
                "/opt/app/sub",
                "bye, hello there with an argument a changed argument",
            ],
            ["lost"],
        ]
        assert "nameserver" in instance.sh(sandbox, "cat /etc/resolv.conf"), "the sandbox has no network"
        listing = instance.sh(sandbox, "cd /opt/app; stat -c '%u %g %a %n' bin/tool /tmp/document; echo notes/* all/*")
        assert listing.splitlines() == [
            *("1234 60 750 bin/tool", "1234 60 600 /tmp/document"),
            "notes/note.txt notes/notes.txt all/Dockerfile all/bin all/note.txt all/notes.txt",
        ]
        (project / "bin" / "tool").write_text(TOOL.replace("id -u", "id -U"))
        predicted = run(_template, {**params, "check_run": "a run with a changed file"}, check_mode=True)
        assert predicted["changed"], predicted["msg"]
        project.joinpath("Dockerfile").write_text(f"FROM {registry}/team/app:2.0\nRUN tool-that-does-not-exist\n")
        failure = run(_template, params, check_mode=False)
        assert "tool-that-does-not-exist" in failure["msg"] and "exit code 127" in failure["msg"]
        assert instance.call("GET", "/templates/app")["templateID"] == result["template"]["id"]
