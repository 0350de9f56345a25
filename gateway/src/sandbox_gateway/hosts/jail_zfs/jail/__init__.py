"""Jails: their file systems, mounts, limits and processes.

``jails`` creates and removes jails, ``rctl`` limits them, ``identity`` writes the files that tell each who it is,
``rootfs`` builds the file system of a template. ``volume_mounts`` mounts volumes, with ``mount_point`` and
``mount_table``; ``holders`` finds what keeps a file system busy.
"""
