"""Each kind of host is implemented in a separate package, independent of the engine's operations.

``base`` defines the interface. This table lists the modules that do each job:

    job                               kvm_xfs                               jail_zfs
    running machines                  machines, qemu                        runner, machine_register, watcher
    disks and records                 image, ..directory_records            disks, storage
    capture                           memory.capture (and disk)             storage.snapshots
    network of a sandbox              network                               network
    volumes                           volumes                               volumes, jail.mounts
    root file system of a template    template                              jail.rootfs
    lock of the host's state          ownership                             storage.host_lock
    scan at start-up                  host                                  recovery

Both kinds share ``rootfs_common`` and ``guest_digest`` (templates), ``addresses`` (network policies), and ``connect``,
which the engine and the API also use to open connections to agents.
"""
