"""Requests to ports inside sandboxes: proxy and websocket stream them, pools and transport manage the connections."""
