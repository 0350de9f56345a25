"""Store volumes as images on disk, and run the servers that sandboxes mount them from.

``kvm_volumes`` is the entry point: it tracks which machines mount which volume, and captures, rolls back and grows
mounted volumes. It uses ``store`` (images and records on disk), ``pending_snapshots`` (snapshots that are not committed
yet), ``image_import`` (volumes from files), ``ports`` and ``server_pool``.

``server_pool`` runs one server for each mounted volume. ``server_start`` starts and reconfigures a server: the program
``launcher`` isolates it, ``seccomp`` filters its system calls, ``configuration`` creates its configuration file, and
``rpc`` queries which configuration is in effect. ``server_process`` represents the running process, ``file_system``
acts on the mounted file system, and ``access`` manages the host's rules for its clients.

``launcher`` is a separate program, which the gateway runs for each server with ``python -I -S``, so it cannot import
this package. Therefore it defines what it shares with this package: the size and the counts of an image's blocks,
the ioctl that grows the file system, and the names and descriptors of a server. The other modules import these from it.
"""
