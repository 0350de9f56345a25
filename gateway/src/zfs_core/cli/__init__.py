"""The command line `lzc`: ZFS for scripts and playbooks.

It compares the desired state with the current one, prints one JSON object, and exits with a code for the kind of
failure. docs/lzc.md describes it.

``main`` runs a command: ``parser`` defines the command line and ``values`` parses its arguments, ``report`` makes the
changes unless they are only checked, and ``failures`` translates exceptions. The commands are in ``filesystems``,
``snapshots``, ``properties``, ``removal`` and ``streams`` (with ``resumable``). ``lookups`` finds the current state,
and ``losses`` refuses commands that would destroy other snapshots. ``build`` makes one executable file of all this.
"""
