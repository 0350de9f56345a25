"""Each kind of host is implemented in a separate package, independent of the engine's operations.

``base`` defines the interface. The packages are ``kvm_xfs`` and ``jail_zfs``. This table lists the modules that do each
job:

    job                               kvm_xfs                               jail_zfs
    running machines                  machines, qemu                        runner, machine_register, watcher,
                                                                            jail.jails, jail.identity
    limits of machines                cgroup                                jail.rctl
    disks and records                 files, record_files                   disks, storage
    capture                           capture, memory, files.snapshots,     disks, storage.snapshots, volumes
                                      volumes.pending_snapshots
    network of a sandbox              network                               network
    volumes                           volumes                               volumes, jail.mounts, jail.suspension
    root file system of a template    template                              jail.rootfs
    lock of the host's state          host_lock                             storage.host_lock
    export and import of snapshots    transfer, part_files                  transfer, storage.snapshot_streams
    export and import of volumes      volumes.image_import, part_files      transfer, storage.volume_streams
    scan at start-up                  recovery, quarantine                  recovery
    commits that survive crashes      commit_protocol                       storage
    external commands and processes   process_checks, bounded_log           commands, retries, storage_calls,
                                                                            jail.holders
    disk usage, and free memory       files, host_memory                    disk_usage, host_memory

Both kinds share ``state_root`` (its creation), ``rootfs_common`` and ``guest_digest`` (templates), ``network_policy``
(egress rules, name servers), ``import_check`` (imports), ``threads`` (blocking work), ``disk_queries`` and
``tree_removal``. The engine also uses ``os_errors`` (errors for callers) and ``positional_writes``, and the engine and
the API use ``connect`` to open connections to agents.
"""
