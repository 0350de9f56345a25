"""Jails: their file systems, mounts, limits and processes."""
