"""Run the unchanged examples in the modules' documentation, in order.

Other tests cover the examples that the gateways here cannot run: `tests/fleet/test_clients.py` those that need a fleet,
`tests/unit/plugins/test_snapshot_exports.py` those that need a host with incremental exports.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collection.runner import Target, Task
from tests.support import artifact_registry
from tests.support.age import make_key
from tests.support.artifact_registry import Registry, registry_started
from tests.support.faulty_gateway import TEMPLATE, running_gateway
from tests.support.session import REPOSITORY

MODULE_FILES = sorted((REPOSITORY / "plugins" / "modules").glob("*.py"))
IMAGE_PATH = "/srv/images/base.tar.zst"
REGISTRY = "registry.example"
IDENTITY_PATH, RECIPIENT = "/root/backup-key.txt", "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
DOCKERFILE_PATH = "/srv/api/Dockerfile"
OPTIONS_OF_OTHER_GATEWAYS = {"placement"}
EXPORTED_FILE_PATHS = ("/srv/before-upgrade.snapshot", "/srv/tuesday.snapshot", "/srv/code-tuesday.volume")
SETUP_TASKS: dict[str, list[Task]] = {
    "sandbox": [{"grove.sandbox.sandbox_volume": {"name": "data"}}],
    "sandbox_snapshot": [
        {"grove.sandbox.sandbox_volume": {"name": "data"}},
        {
            "grove.sandbox.sandbox": {
                "name": ["web", "db"],
                "template": "base",
                "volumes": [{"name": "data", "path": "/srv/data"}],
            }
        },
        {"grove.sandbox.sandbox_snapshot": {"name": "monday", "sandbox": "web"}},
    ],
    "sandbox_fork": [
        {"grove.sandbox.sandbox_volume": {"name": ["cache", "data"]}},
        {
            "grove.sandbox.sandbox": {
                "name": "web",
                "template": "base",
                "volumes": [{"name": "cache", "path": "/srv/cache"}],
            }
        },
        {"grove.sandbox.sandbox_snapshot": {"name": "golden", "sandbox": "web", "volumes": ["cache"]}},
    ],
    "sandbox_volume": [
        {"grove.sandbox.sandbox": {"name": ["writer", "reader-1", "reader-2"], "template": "base"}},
    ],
    "sandbox_rollback": [
        {"grove.sandbox.sandbox": {"name": ["web", "ci-1", "ci-2", "ci-3"], "template": "base"}},
        {"grove.sandbox.sandbox_snapshot": {"name": ["before-upgrade", "golden"], "sandbox": "web"}},
    ],
}


def load_examples(module: Path) -> list[Task]:
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXAMPLES":
            tasks: Any = yaml.safe_load(ast.literal_eval(node.value))
            assert isinstance(tasks, list)
            return tasks
    raise AssertionError(f"{module.name} has no examples")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_started(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture
def snapshot_target(registry: Registry, tmp_path: Path) -> Iterator[Target]:
    """The target that uses a gateway with a registry. It also accepts files."""
    with artifact_registry.running_gateway(tmp_path / "gateway", registry) as gateway:
        yield Target(gateway.unix_url, tmp_path)


@pytest.fixture
def template_target(registry: Registry, tmp_path: Path) -> Iterator[Target]:
    """The target that uses a gateway with a registry, which contains a template."""
    section = {"allowed": [registry.address], "plain_http": [registry.address]}
    with running_gateway(registry=section) as gateway:
        target = Target(gateway.url, tmp_path, template=TEMPLATE)
        reference = f"{registry.address}/team/python:3.12"
        transfer = target.client.post(f"/templates/{TEMPLATE}/push", {"reference": reference})
        while transfer["status"] == "running":
            transfer = target.client.get(f"/transfers/{transfer['transferID']}")
        assert transfer["status"] == "ready", transfer
        yield target


@pytest.mark.parametrize("module", MODULE_FILES, ids=lambda module: module.stem)
def test_examples_succeed_and_change_something(
    request: pytest.FixtureRequest, tmp_path: Path, registry: Registry, module: Path
) -> None:
    # The gateway of `memory_target` forwards only JSON, so no files.
    fixture_names = {
        "sandbox_snapshot": "snapshot_target",
        "sandbox_template": "template_target",
        "sandbox_volume": "plan_target",
    }
    target: Target = request.getfixturevalue(fixture_names.get(module.stem, "memory_target"))
    setup_tasks = SETUP_TASKS.get(module.stem, [])
    image_file = tmp_path / "base.tar.zst"
    image_file.touch()
    examples = [task for task in load_examples(module) if not _needs_another_gateway(task)]
    text = json.dumps(examples).replace(REGISTRY, registry.address)
    # The gateway reads the image of a template to detect changes.
    text = text.replace(IMAGE_PATH, str(image_file))
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM registry.example/team/api:1.4\nRUN apt-get install -y git\n")
    text = text.replace(DOCKERFILE_PATH, str(dockerfile))
    key = make_key(tmp_path / "backup-key.txt")
    text = text.replace(IDENTITY_PATH, key.path).replace(RECIPIENT, key.recipient)
    for path in EXPORTED_FILE_PATHS:
        text = text.replace(path, str(tmp_path / Path(path).name))
    fingerprint = target.client.get("/signer")["fingerprint"]
    variables = {"exporting_gateway_fingerprint": fingerprint, "pushing_gateway_fingerprint": fingerprint}
    results = target.play(*setup_tasks, *json.loads(text), keywords={"vars": variables})
    for result in results:
        assert not result.get("failed"), result["msg"]
    is_info_module = module.stem.endswith("_info")
    assert all(result["changed"] != is_info_module for result in results[len(setup_tasks) :]), results


def _needs_another_gateway(task: Task) -> bool:
    return any(OPTIONS_OF_OTHER_GATEWAYS & options.keys() for options in task.values() if isinstance(options, dict))
