"""Other ways to snapshot, fork and roll back a machine: virsh and QEMU on one side, a hand-written playbook on the
other.
"""
