"""The HTTP API of the gateway.

``access`` authorizes requests, ``native`` and ``forkd`` translate them into calls to the engine, and ``data_plane``
forwards them to sandboxes. In a fleet, ``fleet`` sends each request to the host that must carry it out. ``app``
combines the routes and the middleware, most of which is in these modules:

* requests: ``dependencies``, ``body``, ``client_requests`` and ``unknown_fields`` (parameters and fields); ``waiting``
  cancels slow operations when their client disconnects.
* responses: ``errors``, ``paging`` (lists), ``output`` (large responses), ``events`` (a stream), ``metrics``.
"""
