"""The native API, which contains the calls of E2B and CubeSandbox, with additions.

Each resource has one module with its routes: ``sandboxes``, ``snapshots``, ``templates``, ``volumes``, ``artifacts``
(in registries), ``plans`` and ``applied_runs``. The routes share ``requests`` and ``shapes`` (the models of request and
response bodies), ``view`` (converts records to JSON), ``naming`` (names of fields), and ``snapshot_files`` (exports and
imports).
"""
