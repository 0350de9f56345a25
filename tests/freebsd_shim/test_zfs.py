"""Test that a jail on a ZFS clone keeps the dataset in use for exactly as long as the jail exists."""

from __future__ import annotations

import time

from tests.freebsd_shim.harness import Shim
from tests.support import pools


def destroy_dataset(dataset: str) -> None:
    """Destroy a dataset. Retries, as the host does, because zfs-fuse at first reports a mounted dataset as busy."""
    for _ in range(20):
        if pools.run("zfs", "destroy", dataset, check=False).returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError(pools.run("zfs", "destroy", dataset, check=False).stderr)


def test_a_zfs_clone_is_busy_while_a_jail_uses_it(pool: pools.Pool, shim: Shim) -> None:
    template, clone = f"{pool.name}/template", f"{pool.name}/sandbox"
    pools.run("zfs", "create", template)
    template_root = pool.mount_point / "template"
    for name in ("usr", "dev", "etc", "tmp"):
        (template_root / name).mkdir()
    for name in ("bin", "lib", "lib64"):
        (template_root / name).symlink_to(f"usr/{name}")
    (template_root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    pools.run("zfs", "snapshot", f"{template}@base")
    for attempt in range(2):  # The second time, the name is reused, as after a rollback.
        pools.run("zfs", "clone", f"{template}@base", clone)
        clone_root = pool.mount_point / "sandbox"
        shim.check_ok("mount", "-t", "nullfs", "-o", "ro,nocover", "/usr", str(clone_root / "usr"))
        shim.check_ok("jail", "-i", "-c", "name=z", f"path={clone_root}", "persist", "vnet=new", "mount.devfs")
        shim.check_ok("jexec", "z", "sh", "-c", f"echo {attempt} > /tmp/turn; test -c /dev/null")
        assert (clone_root / "tmp/turn").read_text() == f"{attempt}\n"
        assert pools.run("zfs", "destroy", clone, check=False).returncode != 0  # in use
        assert shim.check_ok("jexec", "z", "cat", "/tmp/turn") == f"{attempt}\n"
        shim.check_ok("jail", "-R", "z")
        shim.check_ok("umount", str(clone_root / "dev"), str(clone_root / "usr"))
        destroy_dataset(clone)
        assert not (clone_root / "tmp").exists()
    mount_output = shim.check_ok("mount", "-t", "zfs", "-p")
    assert f"{template}\t" in mount_output.replace(" ", "\t") and clone not in mount_output
