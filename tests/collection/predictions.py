"""The cases of test_predictions.py, which are also the rows of docs/predictions.md.

In names, ``%`` stands for a prefix that differs for each case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils import (
    _fork,
    _info,
    _rollback,
    _sandbox,
    _snapshot,
    _template,
    _volume,
)
from ansible_collections.grove.sandbox.plugins.module_utils._module import COMMON_ARGUMENTS

from tests.collection.runner import Task
from tests.support import session
from tests.support.session import REPOSITORY

RESOURCE_KINDS: dict[str, Any] = {
    "sandbox": _sandbox,
    "sandbox_template": _template,
    "sandbox_snapshot": _snapshot,
    "sandbox_fork": _fork,
    "sandbox_volume": _volume,
    "sandbox_rollback": _rollback,
    "sandbox_info": _info.SANDBOXES,
    "sandbox_template_info": _info.TEMPLATES,
    "sandbox_snapshot_info": _info.SNAPSHOTS,
    "sandbox_volume_info": _info.VOLUMES,
}


@dataclass(frozen=True, eq=False)
class Case:
    """A test case, which is also one row of docs/predictions.md.

    ``setup_tasks`` set up the case; ``changes`` then modify the setup, as (change, name of the target).
    ``repeated_actions`` says which actions a second run still performs, and why. ``error_kind`` is the kind of an error
    that both check mode and the run report; ``unpredicted_error`` is the kind of an error that only the run reports.
    ``needs_session``: whether a check-mode run predicts the error, but ``check_mode`` in a real run does not.
    """

    module: str
    title: str
    options: Mapping[str, Any]
    setup_tasks: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    repeated_actions: str = ""
    error_kind: str = ""
    unpredicted_error: str = ""
    needs_session: bool = False

    def list_covered_items(self) -> set[tuple[str, str, str]]:
        """Return the states and options that this case covers, as (module, "state" or "option", value or name)."""
        spec = RESOURCE_KINDS[self.module].ARGUMENTS
        items = {(self.module, "option", name) for name in self.options}
        if "state" in spec and "choices" in spec["state"] and spec["state"]["type"] == "str":
            items.add((self.module, "state", self.options.get("state", spec["state"]["default"])))
        return items or {(self.module, "option", "")}


def list_required_items() -> set[tuple[str, str, str]]:
    """Return the items that the cases must cover together, according to the modules' argument specifications."""
    items: set[tuple[str, str, str]] = set()
    for module, resource_kind in RESOURCE_KINDS.items():
        spec = resource_kind.ARGUMENTS
        items |= {(module, "option", name) for name in spec if name not in COMMON_ARGUMENTS}
        if "state" in spec and spec["state"]["type"] == "str":
            items |= {(module, "state", state) for state in spec["state"]["choices"]}
    return items


def make_task(module: str, options: Mapping[str, Any], prefix: str) -> Task:
    return {f"grove.sandbox.{module}": insert_prefix(dict(options), prefix)}


def insert_prefix(value: Any, prefix: str) -> Any:
    """Return ``value`` with ``%`` replaced by the prefix in all strings."""
    if isinstance(value, str):
        return value.replace("%", prefix)
    if isinstance(value, dict):
        return {key: insert_prefix(item, prefix) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [insert_prefix(item, prefix) for item in value]
    return value


TARBALL_PATH = str(REPOSITORY / "galaxy.yml")
"""Any existing file, because the in-memory host does not unpack it."""
CONTEXT = str(REPOSITORY / "tests" / "collection" / "web")
DOCKERFILE = f"{CONTEXT}/Dockerfile"
BOX = ("sandbox", {"name": "%box", "template": "base"})
GOLDEN_SNAPSHOT = ("sandbox_snapshot", {"name": "%golden", "sandbox": "%box"})
THREE_FORKS = ("sandbox_fork", {"snapshot": "%golden", "count": 3, "name_prefix": "%ci"})
DATA_VOLUME = ("sandbox_volume", {"name": "%data", "size_mb": 64})
VOLUME_WITH_SNAPSHOT = ("sandbox_volume", {"name": "%data", "size_mb": 64, "snapshots": ["monday"]})
MOUNT = {"name": "%data", "path": "/srv/data"}
BOX_WITH_VOLUME = ("sandbox", {"name": "%box", "template": "base", "volumes": [MOUNT]})
GOLDEN_SNAPSHOT_WITH_VOLUME = ("sandbox_snapshot", {"name": "%golden", "sandbox": "%box", "volumes": ["%data"]})
WEB_TEMPLATE = ("sandbox_template", {"name": "%web", "packages": ["curl"]})
FILE = f"{session.get_run_path()}/%golden.snapshot"
"""A file that does not exist before the case."""
EXPORTED_SNAPSHOT = ("sandbox_snapshot", {"name": "%golden", "sandbox": "%box", "export_to": FILE})
VOLUME_FILE = f"{session.get_run_path()}/%data.volume"
"""A file that does not exist before the case."""
EXPORTED_VOLUME = (
    "sandbox_volume", {"name": "%data", "size_mb": 64, "snapshots": ["monday"], "export_to": VOLUME_FILE}
)  # fmt: skip
AGE_KEY = "AGE-SECRET-KEY-1UYLVX3MNTW0DWMEQ0N49HTLAHGP28DE9T3FZ0QQJ3AAN8WV7EY6QU4MXKD"
"""A key for these cases alone."""
AGE_RECIPIENT = "age16wrx85sqee7ymq2chzj8vfp29tten6trhkk0lkq6qaax26jmcf4qzvsnt9"
AGE_IDENTITY = f"{session.get_run_path()}/age-key"
"""A file with the key, which the test writes before all cases."""
ENCRYPTED_SNAPSHOT = (
    "sandbox_snapshot", {"name": "%golden", "sandbox": "%box", "export_to": FILE, "age_recipients": [AGE_RECIPIENT]}
)  # fmt: skip
ENCRYPTED_VOLUME = ("sandbox_volume", {**EXPORTED_VOLUME[1], "age_recipients": [AGE_RECIPIENT]})
BOX_CHANGES = (("write", "%box"),)

SANDBOX_CASES = (
    Case("sandbox", "state: present", {"name": "%box", "template": "base", "state": "present"}),
    Case("sandbox", "state: running", {"name": "%box", "template": "base", "state": "running"}),
    Case("sandbox", "state: running, for a paused sandbox", {"name": "%box", "state": "running"},
         (("sandbox", {"name": "%box", "template": "base", "state": "paused"}),)),
    Case("sandbox", "state: running, after the machine terminated", {"name": "%box", "state": "running"}, (BOX,),
         (("end", "%box"),)),
    Case("sandbox", "state: paused", {"name": "%box", "state": "paused"}, (BOX,)),
    Case("sandbox", "state: paused, for a new sandbox", {"name": "%box", "template": "base", "state": "paused"}),
    Case("sandbox", "state: absent", {"name": "%box", "state": "absent"}, (BOX,)),
    Case("sandbox", "several names", {"name": ["%a", "%b"], "template": "base"},
         (("sandbox", {"name": "%a", "template": "base"}),)),
    Case("sandbox", "snapshot", {"name": "%new", "snapshot": "%golden"}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox", "metadata", {"name": "%box", "metadata": {"team": "red", "size": 3}},
         (("sandbox", {"name": "%box", "template": "base", "metadata": {"team": "blue"}}),)),
    Case("sandbox", "timeout", {"name": "%box", "timeout": 3600}, (BOX,)),
    Case("sandbox", "network", {"name": "%box", "network": {"allow_internet": False, "allow_out": ["10.0.0.9/24"]}},
         (BOX,)),
    Case("sandbox", "volumes", {"name": "%box", "volumes": [MOUNT]}, (DATA_VOLUME, BOX)),
    Case("sandbox", "env, set only at creation", {"name": "%box", "template": "base", "env": {"A": "b"}}),
    Case("sandbox", "cpus, memory_mb and disk_mb for a new sandbox, cold_start",
         {"name": "%box", "template": "base", "cpus": 2, "memory_mb": 512, "disk_mb": 4096, "cold_start": True}),
    Case("sandbox", "different memory_mb", {"name": "%box", "template": "base", "memory_mb": 512}, (BOX,),
         error_kind="conflict"),
    Case("sandbox", "different memory_mb, recreate",
         {"name": "%box", "template": "base", "memory_mb": 512, "cold_start": True, "recreate": True}, (BOX,)),
    Case("sandbox", "placement, without a fleet", {"name": "%box", "template": "base", "placement": {"host": "h1"}},
         error_kind="unsupported"),
    Case("sandbox", "continue_on_error, one of three refused",
         {"name": ["%a", "%box", "%c"], "template": "base", "cpus": 2, "cold_start": True, "continue_on_error": True},
         (BOX,), error_kind="conflict"),
)  # fmt: skip

TEMPLATE_CASES = (
    Case("sandbox_template", "state: present", {"name": "%web", "state": "present", "packages": ["nginx", "curl"]}),
    Case("sandbox_template", "state: absent", {"name": "%web", "state": "absent"}, (WEB_TEMPLATE,)),
    Case("sandbox_template", "state: absent, while in use", {"name": "%web", "state": "absent"},
         (WEB_TEMPLATE, ("sandbox", {"name": "%box", "template": "%web"})), error_kind="in_use"),
    Case("sandbox_template", "state: absent, when_unused", {"name": "%web", "state": "absent", "when_unused": True},
         (WEB_TEMPLATE, ("sandbox", {"name": "%box", "template": "%web"}))),
    Case("sandbox_template", "different recipe",
         {"name": "%web", "packages": ["curl"], "setup": ["echo hello"], "start_command": "sleep 1",
          "ready_probe": "true", "ready_timeout": 30, "setup_timeout": 60, "cpus": 2, "memory_mb": 512,
          "disk_mb": 4096}, (WEB_TEMPLATE,)),
    Case("sandbox_template", "same recipe, outdated by an upgrade of the gateway",
         {"name": "%web", "packages": ["curl"]}, (WEB_TEMPLATE,), (("outdate", "%web"),)),
    Case("sandbox_template", "same recipe, outdated, rebuild_outdated: false",
         {"name": "%web", "packages": ["curl"], "rebuild_outdated": False}, (WEB_TEMPLATE,), (("outdate", "%web"),)),
    Case("sandbox_template", "prewarm, for a new template", {"name": "%web", "prewarm": 1}),
    Case("sandbox_template", "prewarm, for an existing template",
         {"name": "%web", "packages": ["curl"], "prewarm": 1}, (WEB_TEMPLATE,)),
    Case("sandbox_template", "different recipe, for a prewarmed template",
         {"name": "%web", "packages": ["curl"]}, (("sandbox_template", {"name": "%web", "prewarm": 1}),)),
    Case("sandbox_template", "from: debootstrap, suite and mirror",
         {"name": "%web", "from": "debootstrap", "suite": "trixie", "mirror": "http://mirror.example/debian"}),
    Case("sandbox_template", "from: rootfs", {"name": "%web", "from": "rootfs", "path": TARBALL_PATH}),
    Case("sandbox_template", "from: rootfs, with a missing path",
         {"name": "%web", "from": "rootfs", "path": "/nowhere/rootfs.tar"}, error_kind="invalid",
         needs_session=True),
    Case("sandbox_template", "from: image", {"name": "%web", "from": "image", "image": "registry.example/web:1"}),
    Case("sandbox_template", "image, registry_username, registry_password",
         {"name": "%web", "image": "registry.example/web:1", "registry_username": "reader",
          "registry_password": "example"}),
    Case("sandbox_template", "dockerfile, context, setup_network",
         {"name": "%web", "dockerfile": DOCKERFILE, "context": CONTEXT, "setup_network": True}),
    Case("sandbox_template", "dockerfile, for a template with another recipe",
         {"name": "%web", "dockerfile": DOCKERFILE}, (WEB_TEMPLATE,)),
    Case("sandbox_template", "dockerfile that does not exist",
         {"name": "%web", "dockerfile": f"{CONTEXT}/missing"}, error_kind="invalid"),
    Case("sandbox_template", "from: artifact, trust, for a registry that is not allowed",
         {"name": "%web", "from": "artifact", "artifact": "registry.example/team/web:1", "trust": ["0" * 64]},
         error_kind="invalid"),
    Case("sandbox_template", "recipe whose build fails", {"name": "%web", "setup": ["fail"]},
         unpredicted_error="backend_failed"),
    Case("sandbox_template", "wait_timeout", {"name": "%web", "wait_timeout": 60}),
    Case("sandbox_template", "continue_on_error, one of two refused",
         {"name": ["%box", "%web"], "continue_on_error": True}, (BOX,), error_kind="name_taken"),
)  # fmt: skip

SNAPSHOT_CASES = (
    Case("sandbox_snapshot", "state: present", {"name": "%golden", "sandbox": "%box", "state": "present"}, (BOX,)),
    Case("sandbox_snapshot", "state: absent", {"name": "%golden", "state": "absent"}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_snapshot", "state: absent, while in use", {"name": "%golden", "state": "absent"},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS), error_kind="in_use"),
    Case("sandbox_snapshot", "state: absent, when_unused",
         {"name": "%golden", "state": "absent", "when_unused": True}, (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_snapshot", "several names and sandboxes", {"name": ["%one", "%two"], "sandbox": ["%box", "%b"]},
         (BOX, ("sandbox", {"name": "%b", "template": "base"}))),
    Case("sandbox_snapshot", "description, memory: none",
         {"name": "%golden", "sandbox": "%box", "description": "a fork point", "memory": "none"}, (BOX,)),
    Case("sandbox_snapshot", "different description for an existing snapshot",
         {"name": "%golden", "sandbox": "%box", "description": "another"},
         (BOX, GOLDEN_SNAPSHOT), error_kind="conflict"),
    Case("sandbox_snapshot", "volumes", {"name": "%golden", "sandbox": "%box", "volumes": ["%data"]},
         (DATA_VOLUME, BOX_WITH_VOLUME)),
    Case("sandbox_snapshot", "expires_in, retention",
         {"name": "%golden", "sandbox": "%box", "expires_in": 86400, "retention": {"keep_last": 3, "max_age": 864000}},
         (BOX,)),
    Case("sandbox_snapshot", "prewarm, for a new snapshot",
         {"name": "%golden", "sandbox": "%box", "prewarm": 1}, (BOX,)),
    Case("sandbox_snapshot", "different prewarm",
         {"name": "%golden", "sandbox": "%box", "prewarm": 0},
         (BOX, ("sandbox_snapshot", {"name": "%golden", "sandbox": "%box", "prewarm": 1}))),
    Case("sandbox_snapshot", "prewarm, for a snapshot without memory",
         {"name": "%golden", "sandbox": "%box", "memory": "none", "prewarm": 1}, (BOX,), error_kind="unsupported"),
    Case("sandbox_snapshot", "when_changed, for a changed sandbox",
         {"name": "%new", "sandbox": "%box", "when_changed": True}, (BOX, GOLDEN_SNAPSHOT), BOX_CHANGES),
    Case("sandbox_snapshot", "when_changed, for an unchanged sandbox",
         {"name": "%new", "sandbox": "%box", "when_changed": True}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_snapshot", "export_to", {"name": "%golden", "export_to": FILE}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_snapshot", "export_to, for a new snapshot",
         {"name": "%golden", "sandbox": "%box", "export_to": FILE}, (BOX,)),
    Case("sandbox_snapshot", "export_to, over the file of another snapshot",
         {"name": "%golden", "export_to": FILE},
         (BOX, GOLDEN_SNAPSHOT, ("sandbox_snapshot", {"name": "%other", "sandbox": "%box", "export_to": FILE}))),
    Case("sandbox_snapshot", "export_to, for a snapshot with volumes",
         {"name": "%golden", "export_to": FILE}, (DATA_VOLUME, BOX_WITH_VOLUME, GOLDEN_SNAPSHOT_WITH_VOLUME),
         error_kind="unsupported"),
    Case("sandbox_snapshot", "export_to, over another file", {"name": "%golden", "export_to": TARBALL_PATH},
         (BOX, GOLDEN_SNAPSHOT), error_kind="invalid"),
    Case("sandbox_snapshot", "age_recipients",
         {"name": "%golden", "export_to": FILE, "age_recipients": [AGE_RECIPIENT]}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_snapshot", "age_recipients, over the same snapshot without encryption",
         {"name": "%golden", "export_to": FILE, "age_recipients": [AGE_RECIPIENT]}, (BOX, EXPORTED_SNAPSHOT)),
    Case("sandbox_snapshot", "age_recipients, over the same file", ENCRYPTED_SNAPSHOT[1], (BOX, ENCRYPTED_SNAPSHOT)),
    Case("sandbox_snapshot", "export_to, over an encrypted file", {"name": "%golden", "export_to": FILE},
         (BOX, ENCRYPTED_SNAPSHOT), error_kind="invalid"),
    Case("sandbox_snapshot", "export_since",
         {"name": "%golden", "sandbox": "%box", "export_to": FILE, "export_since": "base"}, (BOX,)),
    Case("sandbox_snapshot", "export_since, without this snapshot",
         {"name": "%golden", "sandbox": "%box", "export_to": FILE, "export_since": "missing"}, (BOX,),
         error_kind="not_found"),
    Case("sandbox_snapshot", "import_from, trust", {"name": "%copy", "import_from": FILE, "trust": ["0" * 64]},
         (BOX, EXPORTED_SNAPSHOT)),
    Case("sandbox_snapshot", "import_from, for a captured snapshot", {"name": "%golden", "import_from": FILE},
         (BOX, EXPORTED_SNAPSHOT), error_kind="conflict"),
    Case("sandbox_snapshot", "import_from, without the file", {"name": "%copy", "import_from": FILE},
         error_kind="invalid"),
    Case("sandbox_snapshot", "import_from, age_identity",
         {"name": "%copy", "import_from": FILE, "age_identity": AGE_IDENTITY}, (BOX, ENCRYPTED_SNAPSHOT)),
    Case("sandbox_snapshot", "import_from, without age_identity", {"name": "%copy", "import_from": FILE},
         (BOX, ENCRYPTED_SNAPSHOT), error_kind="invalid"),
    Case("sandbox_snapshot", "age_identity, for a file without encryption",
         {"name": "%copy", "import_from": FILE, "age_identity": AGE_IDENTITY}, (BOX, EXPORTED_SNAPSHOT),
         error_kind="invalid"),
    Case("sandbox_snapshot", "push_to, for a registry that is not allowed",
         {"name": "%golden", "push_to": "registry.example/team/env:before"}, (BOX, GOLDEN_SNAPSHOT),
         error_kind="invalid"),
    Case("sandbox_snapshot", "pull_from, for a registry that is not allowed",
         {"name": "%golden", "pull_from": "registry.example/team/env:before"}, error_kind="invalid"),
    Case("sandbox_snapshot", "continue_on_error, one of two refused",
         {"name": ["%one", "%two"], "sandbox": ["%box", "%b"], "continue_on_error": True},
         (BOX, ("sandbox", {"name": "%b", "template": "base", "state": "paused"})), error_kind="conflict"),
)  # fmt: skip

FORK_CASES = (
    Case("sandbox_fork", "state: present, count and name_prefix",
         {"snapshot": "%golden", "state": "present", "count": 3, "name_prefix": "%ci"}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_fork", "state: absent, name_prefix",
         {"snapshot": "%golden", "state": "absent", "name_prefix": "%ci"}, (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "names", {"snapshot": "%golden", "names": ["%red", "%blue"]}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_fork", "smaller count", {"snapshot": "%golden", "count": 2, "name_prefix": "%ci"},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "larger count", {"snapshot": "%golden", "count": 4, "name_prefix": "%ci"},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "smaller count, exact",
         {"snapshot": "%golden", "count": 2, "name_prefix": "%ci", "exact": True}, (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "sibling whose machine terminated", {"snapshot": "%golden", "count": 3, "name_prefix": "%ci"},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS), (("end", "%ci-2"),)),
    Case("sandbox_fork", "sandbox (clones)", {"sandbox": "%box", "names": ["%twin"]}, (BOX,)),
    Case("sandbox_fork", "metadata, paused",
         {"snapshot": "%golden", "count": 3, "name_prefix": "%ci", "metadata": {"run": 7}, "paused": True},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "timeout, with one sibling missing",
         {"snapshot": "%golden", "count": 4, "name_prefix": "%ci", "timeout": 3600},
         (BOX, GOLDEN_SNAPSHOT, THREE_FORKS)),
    Case("sandbox_fork", "concurrency, atomic: false",
         {"snapshot": "%golden", "names": ["%a", "%b"], "concurrency": 1, "atomic": False}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_fork", "cpus and memory_mb, cold_start",
         {"snapshot": "%golden", "names": ["%big"], "cpus": 2, "memory_mb": 512, "cold_start": True},
         (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_fork", "volumes", {"snapshot": "%golden", "names": ["%reader"],
                                     "volumes": [{**MOUNT, "path": "/srv/ro", "read_only": True}]},
         (DATA_VOLUME, BOX_WITH_VOLUME, GOLDEN_SNAPSHOT_WITH_VOLUME)),
    Case("sandbox_fork", "volumes, clone", {"snapshot": "%golden", "names": ["%own"],
                                            "volumes": [{**MOUNT, "clone": True}]},
         (DATA_VOLUME, BOX_WITH_VOLUME, GOLDEN_SNAPSHOT_WITH_VOLUME)),
    Case("sandbox_fork", "name already taken", {"snapshot": "%golden", "names": ["%box"]}, (BOX, GOLDEN_SNAPSHOT),
         error_kind="conflict"),
    Case("sandbox_fork", "name already taken, recreate",
         {"snapshot": "%golden", "names": ["%box"], "recreate": True}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_fork", "placement, without a fleet",
         {"snapshot": "%golden", "names": ["%a"], "placement": {"strategy": "spread"}}, (BOX, GOLDEN_SNAPSHOT),
         error_kind="unsupported"),
    Case("sandbox_fork", "continue_on_error, one of two refused",
         {"snapshot": "%golden", "names": ["%a", "%box"], "continue_on_error": True}, (BOX, GOLDEN_SNAPSHOT),
         error_kind="conflict"),
)  # fmt: skip

VOLUME_CASES = (
    Case("sandbox_volume", "state: present", {"name": "%data", "state": "present", "size_mb": 64}),
    Case("sandbox_volume", "state: absent", {"name": "%data", "state": "absent"}, (DATA_VOLUME,)),
    Case("sandbox_volume", "state: absent, while in use", {"name": "%data", "state": "absent"},
         (VOLUME_WITH_SNAPSHOT, BOX_WITH_VOLUME),
         error_kind="in_use"),
    Case("sandbox_volume", "state: absent, purge, attachments: []",
         {"name": "%data", "state": "absent", "purge": True, "attachments": []},
         (VOLUME_WITH_SNAPSHOT, BOX_WITH_VOLUME)),
    Case("sandbox_volume", "size_mb, larger", {"name": "%data", "size_mb": 128}, (DATA_VOLUME,)),
    Case("sandbox_volume", "size_mb, smaller", {"name": "%data", "size_mb": 64},
         (("sandbox_volume", {"name": "%data", "size_mb": 128}),), error_kind="conflict"),
    Case("sandbox_volume", "attachments",
         {"name": "%data", "attachments": [{"sandbox": "%b", "path": "/srv/b", "read_only": True}]},
         (DATA_VOLUME, BOX_WITH_VOLUME, ("sandbox", {"name": "%b", "template": "base"}))),
    Case("sandbox_volume", "snapshots", {"name": "%data", "snapshots": ["monday", "tuesday"]}, (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "absent_snapshots", {"name": "%data", "absent_snapshots": ["monday", "missing"]},
         (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "snapshots, purge", {"name": "%data", "snapshots": [], "purge": True},
         (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "snapshots, purge, on a jail host where another program has cloned the snapshot",
         {"name": "%data", "snapshots": [], "purge": True}, (VOLUME_WITH_SNAPSHOT,), (("keep", "%data"),),
         unpredicted_error="in_use"),
    Case("sandbox_volume", "from_snapshot", {"name": "%copy", "from_snapshot": "%data@monday"},
         (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "rollback_to", {"name": "%data", "rollback_to": "monday"}, (VOLUME_WITH_SNAPSHOT,),
         repeated_actions="changes since then cannot be detected"),
    Case("sandbox_volume", "rollback_to, while a sandbox writes", {"name": "%data", "rollback_to": "monday"},
         (VOLUME_WITH_SNAPSHOT, BOX_WITH_VOLUME), error_kind="in_use"),
    Case("sandbox_volume", "rollback_to, while a sandbox writes, force",
         {"name": "%data", "rollback_to": "monday", "force": True}, (VOLUME_WITH_SNAPSHOT, BOX_WITH_VOLUME),
         repeated_actions="changes since then cannot be detected"),
    Case("sandbox_volume", "export_to", {"name": "%data", "snapshots": ["monday"], "export_to": VOLUME_FILE},
         (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "export_to, for a new snapshot",
         {"name": "%data", "snapshots": ["tuesday"], "export_to": VOLUME_FILE}, (EXPORTED_VOLUME,)),
    Case("sandbox_volume", "export_to, over another file",
         {"name": "%data", "snapshots": ["monday"], "export_to": TARBALL_PATH}, (VOLUME_WITH_SNAPSHOT,),
         error_kind="invalid"),
    Case("sandbox_volume", "age_recipients",
         {"name": "%data", "snapshots": ["monday"], "export_to": VOLUME_FILE, "age_recipients": [AGE_RECIPIENT]},
         (VOLUME_WITH_SNAPSHOT,)),
    Case("sandbox_volume", "import_from, age_identity",
         {"name": "%copy", "import_from": VOLUME_FILE, "age_identity": AGE_IDENTITY}, (ENCRYPTED_VOLUME,)),
    Case("sandbox_volume", "import_from, trust, larger size_mb",
         {"name": "%copy", "import_from": VOLUME_FILE, "trust": ["0" * 64], "size_mb": 128}, (EXPORTED_VOLUME,)),
    Case("sandbox_volume", "import_from, for a volume that was not imported",
         {"name": "%data", "import_from": VOLUME_FILE}, (EXPORTED_VOLUME,), error_kind="conflict"),
    Case("sandbox_volume", "import_from, without the file", {"name": "%copy", "import_from": VOLUME_FILE},
         error_kind="invalid"),
    Case("sandbox_volume", "continue_on_error, one of two refused",
         {"name": ["%data", "%new"], "size_mb": 64, "continue_on_error": True},
         (("sandbox_volume", {"name": "%data", "size_mb": 128}),), error_kind="conflict"),
)  # fmt: skip

ROLLBACK_CASES = (
    Case("sandbox_rollback", "changed sandbox", {"sandbox": "%box", "snapshot": "%golden"},
         (BOX, GOLDEN_SNAPSHOT), BOX_CHANGES),
    Case("sandbox_rollback", "unchanged sandbox", {"sandbox": "%box", "snapshot": "%golden"}, (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_rollback", "backup_name",
         {"sandbox": "%box", "snapshot": "%golden", "backup_name": "%backup"}, (BOX, GOLDEN_SNAPSHOT), BOX_CHANGES),
    Case("sandbox_rollback", "unless_clean: false",
         {"sandbox": "%box", "snapshot": "%golden", "unless_clean": False}, (BOX, GOLDEN_SNAPSHOT),
         repeated_actions="intended"),
    Case("sandbox_rollback", "continue_on_error, one of two missing",
         {"sandbox": ["%lost", "%box"], "snapshot": "%golden", "continue_on_error": True},
         (BOX, GOLDEN_SNAPSHOT), BOX_CHANGES,
         error_kind="not_found"),
)  # fmt: skip

INFO_CASES = (
    Case("sandbox_info", "all filters",
         {"name": ["%box"], "state": ["running"], "metadata": {"team": "blue"}, "template": "base", "snapshot": "base",
          "started_after": "2020-01-01T00:00:00Z", "diverged": True},
         (("sandbox", {"name": "%box", "template": "base", "metadata": {"team": "blue"}}),)),
    Case("sandbox_template_info", "all filters", {"name": ["base"]}),
    Case("sandbox_snapshot_info", "all filters", {"name": ["%golden"], "sandbox": "%box", "template": "base"},
         (BOX, GOLDEN_SNAPSHOT)),
    Case("sandbox_volume_info", "all filters", {"name": ["%data"]}, (DATA_VOLUME,)),
)  # fmt: skip

CASES = (*SANDBOX_CASES, *TEMPLATE_CASES, *SNAPSHOT_CASES, *FORK_CASES, *VOLUME_CASES, *ROLLBACK_CASES, *INFO_CASES)
