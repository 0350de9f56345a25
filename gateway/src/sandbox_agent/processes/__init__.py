"""Start commands and terminals, transfer their input and output, and send them signals.

``execute`` (`POST /exec`) and ``service`` (envd's API) have the routes. ``process`` represents a process that can
outlive its request, ``child`` starts it, ``output`` distributes its output, and ``shell`` finds a shell.
"""
