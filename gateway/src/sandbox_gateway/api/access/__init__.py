"""Access control: API keys and scopes (auth), access to sandbox ports (ports), limits on request bodies (limits)."""
