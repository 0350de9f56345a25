"""The command `forkd`, implemented on top of a sandbox gateway.

`command`: its commands. `files`: `pack` and `unpack`. `gateway`: the client for the gateway. `port`: the port of `fork`
and `attach`.
"""

__version__ = "0.1.0"
