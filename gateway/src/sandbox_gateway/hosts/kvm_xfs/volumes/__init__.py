"""Volumes: images on disk, and the servers that sandboxes mount them from.

``kvm_volumes`` is the entry: who mounts which volume, and capture, rollback and growth while volumes are mounted. It
uses ``store`` (images and records on disk), ``pending_snapshots`` (snapshots that are not committed yet), ``ports`` and
``server_pool``.

``server_pool`` has one server for each mounted volume. ``server_start`` starts and reconfigures one: ``launcher`` runs
as a program and isolates it, ``seccomp`` filters its system calls, ``configuration`` is its configuration file, and
``rpc`` asks it which one is in effect. ``server_process`` is the running process, ``file_system`` the mounted file
system in it, ``access`` the rules on the host for its clients.
"""
