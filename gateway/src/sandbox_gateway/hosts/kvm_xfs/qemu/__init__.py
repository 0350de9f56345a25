"""Run one QEMU machine: its command line, monitor, limits and log.

``machine`` represents the running process with its monitor, ``processes`` starts and finds processes, ``command_line``
builds their arguments, ``accel`` chooses between KVM and TCG. ``sockets``, ``cgroup`` and ``bounded_log`` are helpers;
volume servers also use ``cgroup`` and ``bounded_log``.
"""
