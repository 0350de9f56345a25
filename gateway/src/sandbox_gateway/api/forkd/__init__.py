"""The API of forkd's clients, under `/v1`: routes, and the models of their request and response bodies."""
