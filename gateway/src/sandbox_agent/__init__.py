"""The agent inside a sandbox: runs commands, moves files, gives the sandbox its identity after a fork.

Standard library only, Python 3.9 or newer; started as ``python3 -m sandbox_agent`` or, copied somewhere as a
folder, as ``python3 /opt/sandbox_agent``. Modules that are dear to import and seldom needed (``typing``,
``dataclasses``, ``urllib``) are kept off the start and off the way of a request on purpose: under emulation a
sandbox's Python is twenty times slower than the host's.
"""
