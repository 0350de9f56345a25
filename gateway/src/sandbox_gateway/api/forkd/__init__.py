"""The API of forkd's clients, below `/v1`: routes, and the shapes of their bodies and answers."""
