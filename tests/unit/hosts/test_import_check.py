"""Disks are imported only on hosts of the same kind and architecture."""

from __future__ import annotations

import os

import pytest

from sandbox_gateway.errors import Unsupported
from sandbox_gateway.hosts.import_check import require_compatible_origin


def test_a_disk_from_an_identical_host_is_accepted() -> None:
    require_compatible_origin("jail_zfs", os.uname().machine, kind="jail_zfs")


def test_a_disk_of_another_kind_of_host_is_refused() -> None:
    with pytest.raises(Unsupported, match="from a kvm_xfs host, but this is a jail_zfs host: use a kvm_xfs host"):
        require_compatible_origin("kvm_xfs", os.uname().machine, kind="jail_zfs")


def test_a_disk_for_another_architecture_is_refused() -> None:
    with pytest.raises(Unsupported, match="requires a host for pdp11"):
        require_compatible_origin("kvm_xfs", "pdp11", kind="kvm_xfs")
