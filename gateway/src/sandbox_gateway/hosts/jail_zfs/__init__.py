"""The host kind `jail_zfs`: FreeBSD jails on ZFS clones.

``host`` implements `hosts.base` with these modules:

    ``transfer``          exports and imports snapshots and volumes as ZFS streams
    ``recovery``          scans at start-up and adopts running jails
    ``runner``            starts and stops a jail with its network, mounts and limits; changes its network policy
    ``machine_register``  lists the running machines and reserves their addresses
    ``watcher``           detects jails that stop on their own
    ``disks``             clones, mounts, captures and removes the file systems of sandboxes, saves their records, and
                          saves, names and removes their snapshots, using ``storage_calls``, ``retries`` and
                          `jail.mounts`
    ``volumes``           creates, captures and attaches volumes, and suspends jails during a capture that is not
                          atomic, using ``storage_calls``, ``retries``, `jail.mounts` and `jail.suspension`
    ``storage_calls``     runs methods of ``storage`` in threads, and names what uses a dataset that is busy, using
                          `jail.holders`
    ``retries``           retries the removal of file systems that are in use
    ``disk_usage``        measures the disk space of sandboxes and snapshots
    ``host_memory``       reads the host's free memory
    ``linux_images``      refuses templates from images, and reads whether linux(4) is loaded
    ``commands``          runs FreeBSD's commands

Packages: ``jail`` (a jail's configuration, limits, mounts and root file system), ``network`` (bridge, epairs, pf),
``storage`` (datasets, snapshots, records, the lock).

A module imports only modules below it in this list (tests/lint/imports.toml). ``storage`` uses `zfs_core` instead of
``commands``.

    host
    transfer
    recovery, watcher
    runner
    disks, volumes
    machine_register, retries, storage_calls
    disk_usage, host_memory, linux_images, jail, network, storage
    commands
"""
