"""The command line `lzc`: ZFS for scripts and playbooks.

It compares the desired state with the current one, prints one JSON object, and exits with a code for the kind of
failure. docs/lzc.md describes it.
"""
