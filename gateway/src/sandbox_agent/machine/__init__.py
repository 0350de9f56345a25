"""Manage the machine: users, the identity after a fork, clock, entropy, file system freezes and mounts."""
