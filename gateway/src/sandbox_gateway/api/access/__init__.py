"""Access control: who may send a request, and how much of it.

``auth`` checks API keys and their scopes, ``ports`` checks requests to ports of sandboxes, and ``signed_urls`` checks
the signatures of URLs for files. ``forwarded`` transmits the caller of a request that another gateway of the fleet
carries out. ``limits`` limits the size and upload time of request bodies, and ``pace`` how slowly a client may transfer
a file.
"""
