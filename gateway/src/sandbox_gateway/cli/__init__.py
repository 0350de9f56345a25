"""`sandboxctl`, the command-line client of the gateway's HTTP API."""
