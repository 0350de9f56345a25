"""QEMU virtual machines whose disks and memories are XFS reflinks of one another."""
