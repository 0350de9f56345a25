"""The data plane, for ports inside sandboxes: proxy and websocket stream requests, pools and transport manage
connections.
"""
