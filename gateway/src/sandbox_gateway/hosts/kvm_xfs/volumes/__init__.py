"""Store volumes as images on disk, and run the servers that sandboxes mount them from.

``kvm_volumes`` is the entry point: it tracks which machines mount which volume, and captures, rolls back and grows
mounted volumes. It uses ``store`` (images and records on disk), ``pending_snapshots`` (snapshots that are not committed
yet), ``ports`` and ``server_pool``.

``server_pool`` runs one server for each mounted volume. ``server_start`` starts and reconfigures a server: the program
``launcher`` isolates it, ``seccomp`` filters its system calls, ``configuration`` creates its configuration file, and
``rpc`` queries which configuration is in effect. ``server_process`` represents the running process, ``file_system``
acts on the mounted file system, and ``access`` manages the host's rules for its clients.
"""
