"""Jails: their file systems, mounts, limits and processes.

``jails`` creates and removes jails, ``names`` chooses their names, ``rctl`` limits their resources, ``identity`` writes
the files that identify a jail, and ``rootfs`` builds the file system of a template. ``mounts`` mounts volumes in jails,
using ``mount_point`` and ``mount_table``, while ``suspension`` suspends the jails. ``holders`` lists the users of a
busy file system.
"""
