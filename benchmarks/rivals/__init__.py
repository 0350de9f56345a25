"""Other ways to snapshot, fork and roll back a machine: virsh, QEMU and, for jails, a hand-written playbook."""
