"""Run sandboxes as QEMU virtual machines whose disks and memory images share blocks (XFS reflinks).

``host`` implements `hosts.base` with these modules:

    ``recovery``         scans at start-up, adopts running machines and removes orphaned files
    ``capture``          captures the disk of a running machine, and its memory
    ``transfer``         exports and imports the files of snapshots
    ``machines``         starts, adopts, limits and stops machines
    ``record_files``     reads and writes the record in the directory of each object
    ``commit_protocol``  creates and removes directories of objects, so that a crash leaves no partial objects
    ``quarantine``       moves damaged objects to a directory of their own
    ``host_lock``        locks the state root and the network prefix against a second gateway
    ``host_memory``      reads the host's free memory
    ``cgroup``           limits the resources of machines and volume servers
    ``bounded_log``      keeps the output of machines and volume servers
    ``part_files``       reads the files that an export contains
    ``process_checks``   identifies processes that an earlier gateway started

Packages: ``files`` (of machines and snapshots), ``qemu`` (one machine), ``memory`` (pages of its memory), ``network``
(slots), ``volumes`` (volumes and their servers), ``template`` (disks of templates).

A module imports only modules below it in this list (tests/lint/imports.toml):

    host
    capture, recovery, template, transfer
    machines, memory
    qemu, volumes
    part_files
    files, network
    quarantine, record_files
    bounded_log, cgroup, commit_protocol, host_lock, host_memory, process_checks

These imports may be surprising: ``qemu`` starts processes in the network namespace of a slot, ``volumes`` uses the
addresses and rules of ``network`` for its servers, and ``template`` uses the guest's addresses (``network``) and kernel
arguments (``qemu``), because a template depends on them.
"""
