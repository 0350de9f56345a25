"""Attacks, one file for each attacker and target: guest root, nobody (no key), a client with a read key, a sandbox
under Ansible. Each test carries out the attack and asserts that it fails.
"""
