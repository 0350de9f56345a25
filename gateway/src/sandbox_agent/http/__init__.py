"""HTTP and the Connect protocol of envd. This package does not depend on the sandbox.

``server`` accepts connections, and ``wire`` reads their requests and writes the responses. ``connect`` implements the
Connect protocol, ``message`` reads values from JSON, and ``multipart`` parses forms.
"""
