"""The host kind `jail_zfs`: FreeBSD jails on ZFS clones.

``host`` implements ``hosts.base``. ``recovery`` scans at start-up, ``runner`` starts and stops a jail with its network,
mounts and limits, ``running_machines`` tracks the running jails, and ``watcher`` detects jails that stop on their own.
``disks`` and ``volumes`` manage the file systems of sandboxes and volumes, using ``storage``. ``command_runner`` runs
FreeBSD's commands.

Packages: ``jail`` (a jail's configuration, limits, mounts and root file system), ``network`` (bridge, epairs, pf),
``storage`` (datasets, snapshots, records, the lock).
"""
