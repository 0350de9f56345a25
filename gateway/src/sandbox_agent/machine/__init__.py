"""The machine: users, identity after a fork, clock, entropy, file system freezes and mounts."""
