"""The daemon `sandbox-gateway`: its commands, its startup and shutdown, and its listeners."""
