"""The network of jails.

``jail_network`` connects jails, using ``epair`` (a bridge, and an epair to each jail) and ``pf`` (the packet filter).
"""
