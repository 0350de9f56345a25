"""One QEMU machine: its command line, monitor, limits and log."""
