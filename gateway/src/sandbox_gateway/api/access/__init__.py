"""Keys and scopes (auth), tokens for the ports of sandboxes (ports), limits on request bodies (limits)."""
