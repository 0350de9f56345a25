"""Many hosts as one: the members, the hosts of all names, and the choice of hosts for new sandboxes.

Imports go from api to fleet to engine. Without `[fleet]` in the configuration, nothing of this package is imported.
A module imports only modules below it in this list (tests/lint/imports.toml):

* ``fleet``: creates the objects of all parts, and starts and stops them.
* ``directory``: the names and ids of this gateway's objects, and the memory that starting machines need.
  ``run_directory``: the gateways that have opened plan sessions and applied runs.
* ``membership``: the lease and the record of this gateway.
* ``holds``: forks on several hosts. ``moves``: which host has a sandbox that moves. ``lookups``: requests for names
  that the view does not know. ``peers``: connections to the other gateways. ``placement``: the choice of hosts for new
  sandboxes.
* ``view``: the members, hosts and objects of the fleet, kept up to date by a watch.
* ``records``: the values of the keys in etcd. ``secret``: the secret that all members share. ``store``: requests to
  etcd, with bounded waits. ``keys``: the layout of the keys.
"""
