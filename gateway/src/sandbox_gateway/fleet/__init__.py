"""Many hosts as one: the members, the hosts of all names, and the choice of hosts for new sandboxes.

Imports go from api to fleet to engine. Without `[fleet]` in the configuration, nothing of this package is imported.
Each module imports only modules above it in this list:

* ``store``: requests to etcd, with bounded waits.
* ``keys``, ``records``: the layout of the keys in etcd, and their values.
* ``secret``: the secret that all members share.
* ``view``: the members, hosts and objects of the fleet, kept up to date by a watch.
* ``peers``: connections to the other gateways. ``placement``: the choice of hosts for new sandboxes. ``holds``: forks
    on several hosts.
* ``lookups``: requests for names that the view does not know.
* ``membership``: the lease and the record of this gateway.
* ``directory``: the names and ids of this gateway's objects, and the memory that starting machines need.
* ``fleet``: the composition of all parts.
"""
