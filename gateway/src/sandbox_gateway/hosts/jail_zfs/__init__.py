"""The host kind `jail_zfs`: FreeBSD jails on ZFS clones.

``host`` implements ``hosts.base`` with these modules:

    recovery            scans at start-up and adopts running jails
    runner              starts and stops a jail with its network, mounts and limits
    machine_register    lists the running machines and reserves their addresses
    watcher             detects jails that stop on their own
    disks               the file systems of sandboxes; ``storage`` manages their datasets
    volumes             the volumes of sandboxes; ``storage`` manages their datasets, ``jail.mounts`` mounts them
    retries             retries the removal of file systems that are in use
    commands            runs FreeBSD's commands

Packages: ``jail`` (a jail's configuration, limits, mounts and root file system), ``network`` (bridge, epairs, pf),
``storage`` (datasets, snapshots, records, the lock).
"""
