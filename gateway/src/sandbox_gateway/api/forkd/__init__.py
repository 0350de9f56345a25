"""The API of forkd's clients, below `/v1`: routes, and the models of their request and response bodies."""
