"""`sandboxctl`, the command-line client of the gateway's HTTP API.

``main`` is the entry point. It runs queries through ``quick``, which does not import the command-line library, and all
other commands through ``app``.

* commands: ``queries``, which only show information; ``sandboxes``, ``snapshots``, ``templates``, ``volumes``,
  ``artifacts`` (registries), ``gateway``, ``hosts``, ``plans``.
* shared by commands: ``context``, ``options``, ``settings``, ``client`` (HTTP), ``snapshot_files`` (export and
  import), ``encryption`` (of such files), ``build_context`` (Dockerfiles).
* plans: ``plan_file`` reads a file, ``plan_comparison`` compares two, ``plan_text`` shows them.
* output: ``render``, ``progress``, ``formats``; ``failure`` explains errors, with the help of ``option_names``.
"""
