"""Access control: API keys and scopes (auth), sandbox ports (ports), signed file URLs (signed_urls) and limits on
request bodies (limits).
"""
