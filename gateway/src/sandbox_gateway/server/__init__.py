"""The daemon `sandbox-gateway`, with its commands, startup, shutdown and listeners."""
