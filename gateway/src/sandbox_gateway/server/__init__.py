"""`sandbox-gateway`, the daemon: its command, its start and stop, its listeners."""
