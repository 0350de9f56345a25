"""Manage the machine's users, identity, clock, entropy, file system freezes and mounts."""
