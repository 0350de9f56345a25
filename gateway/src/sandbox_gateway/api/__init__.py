"""The HTTP API of the gateway.

access/ authorizes requests, native/ and forkd/ translate them into calls to the engine, and data_plane/ forwards
them to sandboxes.
"""
