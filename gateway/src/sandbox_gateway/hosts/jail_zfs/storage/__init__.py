"""Datasets, snapshots and records of a jail host in ZFS."""
