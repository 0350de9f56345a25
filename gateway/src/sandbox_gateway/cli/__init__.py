"""`sandboxctl`, the command-line client: talks HTTP to a gateway."""
