"""Attacks on the gateway, with one file for each attacker and target.

The attackers are root in a guest, nobody (a caller without a key), clients with a key, users of the host, suppliers of
packages, and a sandbox that Ansible manages. Each test carries out an attack and asserts that it fails.
"""
