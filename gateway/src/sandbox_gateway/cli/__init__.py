"""`sandboxctl`, which talks HTTP to a gateway, and `sandbox-gateway`, which is one."""
