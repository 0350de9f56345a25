"""Kinds of host: each package implements one platform, independent of the engine's operations.

``base`` is the interface. Where each kind does the same job:

    job                               kvm_xfs                               jail_zfs
    running machines                  running_machines, qemu                runner, running_machines, watcher
    disks and records                 image, ..directory_records            disks, storage
    capture                           memory.capture (and disk)             storage.snapshots
    network of a sandbox              network                               network
    volumes                           volumes                               volumes, jail.volume_mounts
    root file system of a template    template                              jail.rootfs
    lock of the host's state          ownership                             storage.ownership
    scan at start-up                  host                                  recovery

Shared: ``rootfs_common`` and ``guest_digest`` for templates, ``addresses``, and ``connect``, which opens connections to
agents also for the engine and the API.
"""
