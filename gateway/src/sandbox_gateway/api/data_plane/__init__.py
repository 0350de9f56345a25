"""The data plane, which forwards requests to ports inside sandboxes.

``proxy`` and ``websocket`` stream requests and responses; ``pools`` and ``transport`` manage the connections to
sandboxes. ``heads`` limits the heads of responses, and ``fragments`` parses the messages of WebSockets. ``streams``
contains the parts that forwarding in a fleet also uses.
"""
