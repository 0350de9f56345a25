"""The API of forkd's clients, under `/v1`: its ``routes``, and ``shapes``, the models of requests and responses."""
