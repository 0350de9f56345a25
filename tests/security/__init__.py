"""Attacks on the gateway, with a file for each attacker and target.

The attackers are root in a guest, nobody (a caller without a key), clients with a key, local users, and a sandbox
managed by Ansible. Each test carries out an attack and asserts that it fails.
"""
