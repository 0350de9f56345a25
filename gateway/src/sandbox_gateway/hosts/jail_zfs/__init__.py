"""The host kind `jail_zfs`: FreeBSD jails on ZFS clones.

``host`` implements ``hosts.base``. ``recovery`` scans at start-up, ``runner`` starts and stops a jail with everything
around it, ``running_machines`` knows the running ones, ``watcher`` notices those that end. ``disks`` and ``volumes``
are the file systems of sandboxes and volumes, over ``storage``. ``command_runner`` runs FreeBSD's commands. The
packages: ``jail`` (a jail's configuration, limits, mounts and root file system), ``network`` (bridge, epairs, pf),
``storage`` (datasets, snapshots, records, the lock).
"""
