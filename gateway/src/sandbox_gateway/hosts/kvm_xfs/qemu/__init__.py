"""Run one QEMU machine: its command line, process and monitor.

``machine`` represents the running process with its monitor, ``processes`` starts and finds processes, ``command_line``
builds their arguments, ``sockets`` uses Unix sockets at long paths, and ``accel`` chooses between KVM and TCG.
"""
