"""The API of a fleet: its hosts, and requests that other gateways carry out. Imported only with `[fleet]`."""
