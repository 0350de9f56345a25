"""Manage network slots: namespaces, links and rules.

``slots`` is the entry point: a pool of slots, one for each machine. ``namespaces`` creates and enters network
namespaces, ``links`` creates the interfaces in them, ``rules`` creates the nftables rules, and ``conntrack`` deletes
tracked connections. ``addresses`` defines all names and addresses.

If a policy allows domain names, ``resolver`` answers the DNS queries of the guest. ``name_policy`` decides which names
and addresses are allowed, ``upstream`` asks the host's name servers, and ``dns_messages`` reads and writes messages.
"""
