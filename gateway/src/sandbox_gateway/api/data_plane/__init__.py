"""The data plane, which forwards requests to ports inside sandboxes.

proxy and websocket stream requests and responses; pools and transport manage the connections to sandboxes.
"""
