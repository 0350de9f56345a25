"""Network slots: namespaces, links and rules.

``slots`` is the entry: a pool of slots, one for each machine. ``namespaces`` creates and enters network namespaces,
``links`` the interfaces in them, ``rules`` the nftables rules, ``conntrack`` forgets connections. ``addresses`` has all
names and addresses.
"""
