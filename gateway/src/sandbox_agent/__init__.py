"""The agent inside a sandbox: runs commands, transfers files, gives the sandbox its identity after a fork.

It needs only the standard library of Python 3.9 or newer, because a sandbox may have nothing else. It starts as
``python3 -m sandbox_agent`` or, copied as a folder, as ``python3 /opt/sandbox_agent``.

Slow imports (``typing``, ``dataclasses``, ``urllib``) are avoided at start-up and on the path of a request: under
emulation a sandbox's Python is twenty times slower than the host's.
"""
