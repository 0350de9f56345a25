"""The agent inside a sandbox, which runs commands, transfers files and sets the sandbox's identity after a fork.

It needs only the standard library of Python 3.9 or newer, because a sandbox may have nothing else. Run it with
``python3 -m sandbox_agent`` or, if the package was copied to /opt, with ``python3 /opt/sandbox_agent``.

``agent`` is the entry point. It serves the routes of ``files``, ``processes`` and ``interpreter`` over ``http``, and
manages the ``machine``. ``failure`` defines the errors that it returns.

Slow imports (`typing`, `dataclasses`, `urllib`) are avoided during startup and while a request is served: under
emulation, Python in a sandbox is twenty times slower than on the host.
"""
